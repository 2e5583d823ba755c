"""A data set cut to a scale and kept in one file, so that a hundred cells do not decode the same images."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.data.named import load_named
from fedmpq.data.stratified import stratified_subset
from fedmpq.lab.experiment import ExperimentError
from fedmpq.lab.paper_tables import DataSet, data_set_of
from fedmpq.lab.scales import Scale
from fedmpq.system.durable_files import replacing, write_durably

_SPLIT_SEED = 0
"""The simulator's own: the same limits choose the same images."""


@dataclass(frozen=True)
class StoredData:
    """What a table's cells train on."""

    data_set: DataSet
    path: Path
    train_images: int
    test_images: int
    side: int
    skipped: int
    """Images that could not be read, in the whole set."""


def store_data(spec: str, scale: Scale, folder: Path) -> StoredData:
    """Load, resize and limit the set once, or find that this was done before.

    `folder/KEY.npz` holds the images and `folder/KEY.json` where they come from. A simulation with the same
    size and limits on `spec` itself trains on the same images.
    """
    for record_path in sorted(folder.glob("*.json")):
        record = json.loads(record_path.read_text(encoding="utf-8"))
        if record["source"] == _source(spec):
            data_set = data_set_of(spec, record["classes"])
            _check_limits(record, record_path, scale)
            return _stored(data_set, record, folder)
    cut = scale.cut
    train, test = load_named(spec, split_seed=_SPLIT_SEED, size=cut.size)
    data_set = data_set_of(spec, len(train.class_names))
    record_path = folder / f"{data_set.key}.json"
    if record_path.exists():
        raise ExperimentError(f"{folder} holds another {data_set.title} than {spec}; choose another --out")
    skipped = len(train.skipped) + len(test.skipped)
    train, test = _limited(train, cut.train_limit), _limited(test, cut.test_limit)
    record = {
        "source": _source(spec),
        "size": cut.size,
        "train_limit": cut.train_limit,
        "test_limit": cut.test_limit,
        "classes": len(train.class_names),
        "train_images": len(train),
        "test_images": len(test),
        "side": train.image_shape[0],
        "skipped": skipped,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / f"{data_set.key}.npz", train, test)
    # After the images: the record says that they are complete.
    write_durably(record_path, (json.dumps(record, indent=2) + "\n").encode(), private=False)
    return _stored(data_set, record, folder)


def _source(spec: str) -> str:
    path = Path(spec).expanduser()
    return str(path.resolve()) if path.exists() else spec


def _check_limits(record: dict[str, Any], path: Path, scale: Scale) -> None:
    cut = scale.cut
    wanted = (cut.size, cut.train_limit, cut.test_limit)
    if (record["size"], record["train_limit"], record["test_limit"]) != wanted:
        raise ExperimentError(f"{path} is of another scale than {scale.name}; choose another --out")


def _stored(data_set: DataSet, record: dict[str, Any], folder: Path) -> StoredData:
    path = (folder / f"{data_set.key}.npz").resolve()
    if not zipfile.is_zipfile(path):
        raise ExperimentError(f"{path} is missing or damaged; remove {data_set.key}.json beside it")
    numbers = {name: record[name] for name in ("train_images", "test_images", "side", "skipped")}
    return StoredData(data_set, path, **numbers)


def _limited(data: Dataset, limit: int | None) -> Dataset:
    if limit is None or limit >= len(data):
        return data
    return data.subset(stratified_subset(data.labels, limit, _SPLIT_SEED))


def _save(path: Path, train: Dataset, test: Dataset) -> None:
    with replacing(path, private=False) as file:
        np.savez(
            file,
            x_train=train.images,
            y_train=train.labels,
            x_test=test.images,
            y_test=test.labels,
            class_names=np.array(train.class_names),
        )
