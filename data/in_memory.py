"""Data that a program holds already: arrays, or anything that gives samples with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.answers import read_answers
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import DataError, Dataset, Size, resized
from fedmpq.data.fitting import Form
from fedmpq.data.samples import KINDS, Samples, channels_first
from fedmpq.data.value_range import ValueRange

T = TypeVar("T")

IN_MEMORY = "the data in memory"
_SHAPES = (
    "uint8 pixels (H, W, C) or (H, W), or with channels first, as torch has it, int16 or floats (C, H, W), "
    "(C, L) or (F,)"
)


@runtime_checkable
class Indexed(Protocol):
    """What `torch.utils.data.Dataset` of a known length offers: `(sample, label)` by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class InMemory:
    """Data sets that are there already."""

    def __init__(self, train: Dataset, test: Dataset | None = None) -> None:
        self._sets: dict[Split, Dataset] = {"train": train}
        if test is not None:
            self._sets["test"] = test

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._sets)

    def load(self, split: Split, size: Size | None) -> Dataset:
        return resized(self._sets[split], size)


def from_arrays(
    values: NDArray[Any],
    answers: NDArray[Any] | Sequence[Any] | None = None,
    class_names: Sequence[str] = (),
    name: str = IN_MEMORY,
) -> Samples:
    """Samples: uint8 `(N, H, W, C)` or `(N, H, W)`, or channels first for the rest; and what is known of
    each (`read_answers`)."""
    array = _values(values)
    if array.ndim not in (2, 3, 4):
        raise DataError(f"{name}: the samples have shape {array.shape}; each is to be {_SHAPES}")
    labels, targets, names = read_answers(name, answers, len(array), class_names)
    if array.dtype != np.uint8 or array.ndim == 2 or _is_tensor(values):
        array = channels_first(name, array)
    elif array.ndim == 3:
        array = array[..., None]
    return Samples(name, array, labels, names, targets=targets)


def from_pairs(pairs: Indexed, name: str = IN_MEMORY) -> Samples:
    """All `(sample, label)` pairs of an object, read once; samples are PIL's images, arrays or tensors, and
    targets may stand in the place of labels.

    The classes are called as the object's `classes` says, where it has them.
    """
    found = (pairs[index] for index in range(len(pairs)))
    return from_items(found, name, getattr(pairs, "classes", ()))


def from_items(items: Iterable[Any], name: str = IN_MEMORY, class_names: Sequence[str] = ()) -> Samples:
    """All `(sample, label)` pairs that an iterable gives, or `(samples, labels)` of several at once; targets
    may stand in the place of labels."""
    values: list[NDArray[Any]] = []
    answers: list[NDArray[Any]] = []
    tensors = False
    for index, item in enumerate(items):
        sample, answer = _pair(item, index, name)
        # Targets of a single sample are floats or truth values; whole numbers are the labels of several.
        several = answer.ndim == 2 or (answer.ndim == 1 and answer.dtype.kind in "iu")
        values.append(_values(sample) if several else _values(sample)[None])
        answers.append(answer if several else answer[None])
        tensors = _is_tensor(sample)
    if not values:
        raise DataError(f"{name} is empty; give at least two samples")
    if len({(array.shape[1:], array.dtype) for array in values}) > 1:
        raise DataError(f"{name}: the samples differ in shape or type; bring them to one")
    whole = np.concatenate(values)
    if tensors and whole.dtype == np.uint8 and whole.ndim > 2:
        whole = channels_first(name, whole)
    return from_arrays(whole, np.concatenate(answers), class_names, name)


def _pair(item: Any, index: int, name: str) -> tuple[Any, NDArray[Any]]:
    try:
        sample, answer = item
        numbers = np.asarray(answer)
        if numbers.ndim > 2 or numbers.dtype.kind not in "iufb":
            raise ValueError(f"its label is {numbers.dtype} of shape {numbers.shape}, no number")
        return sample, numbers
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: item {index} is no pair of a sample and a label: {error}") from None


def _values(sample: Any) -> NDArray[Any]:
    array = np.asarray(sample)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype not in (np.uint8, np.int16) and array.dtype.kind != "f":
        raise DataError(f"samples are {array.dtype}, must be {KINDS}; each is to be {_SHAPES}")
    return array


def _is_tensor(sample: Any) -> bool:
    """Whether it is torch's, whose images have their channels first also as uint8."""
    return type(sample).__module__.partition(".")[0] == "torch"


class PairsSource:
    """A source of samples with labels, all for training: `(samples, labels)` as arrays, an object that gives
    pairs by index, or one that gives them one after the other, which `again` makes anew for every reading."""

    def __init__(self, found: object, name: str, again: Callable[[], object]) -> None:
        self._found: object | None = found
        self._name = f"data source {name}"
        self._again = again

    def splits(self) -> tuple[Literal["train"]]:
        return ("train",)

    def load(self, split: Split, size: Size | None) -> Dataset:
        """All samples, at the size they have."""
        return self.samples(split).coded()

    def samples(self, split: Split, form: Form | None = None) -> Samples:
        try:
            return self._read()
        except DataError as error:
            raise DataError(str(error)) from error
        # Whatever the user's code raises: the cause is chained, the message says whose code it was.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"{self._name}: reading its samples failed: {reason}") from error

    def bounds(self, split: Split) -> ValueRange | None:
        return self.samples(split).bounds()

    def _read(self) -> Samples:
        found = self._again() if self._found is None else self._found
        if is_arrays(found):
            return from_arrays(*found, name=self._name)  # type: ignore[misc]
        if isinstance(found, np.ndarray):
            return from_arrays(found, name=self._name)
        if isinstance(found, Indexed):
            return from_pairs(found, self._name)
        # What gives its items once is used up.
        self._found = None
        assert isinstance(found, Iterable)
        return from_items(found, self._name)


def is_arrays(found: object) -> bool:
    """Whether it is `(samples, labels)` as arrays."""
    return isinstance(found, tuple) and len(found) == 2 and getattr(found[0], "ndim", 0) > 1
