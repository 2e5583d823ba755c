"""Starting from weights that are there already: a torch state dict, or the model of an earlier run."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.method.archive import ArchiveError, Tensors, read_arrays
from fedmpq.model.graph import Graph, GraphError
from fedmpq.model.quantized import Side, Weights

if TYPE_CHECKING:
    from torch import nn

CHECKPOINT = "checkpoint.npz"
STATE_DICTS = (".pt", ".pth", ".bin")
SHOWN = 3


class WarmStartError(ValueError):
    """Weights that cannot be read or do not fit the network."""


@dataclass(frozen=True)
class EarlierWeights:
    """Tensors by the names that the graph's layers and side tensors have."""

    source: str
    tensors: Mapping[str, NDArray[Any]]

    @classmethod
    def of_model(cls, source: str, weights: Weights, side: Side) -> EarlierWeights:
        """The global model of an earlier run."""
        return cls(source, {**{f"{name}.weight": tensor for name, tensor in weights.items()}, **side})

    def start(self, graph: Graph, weights: Weights, side: Side) -> tuple[Weights, Side]:
        """These tensors in place of the first ones of a new run.

        Every layer and every parameter of the network must be here with its shape. Clips of activations are
        taken where the earlier run had them; a float network has none.
        """
        clips = {name for name in side if name.endswith(".clip")}
        wanted = {f"{name}.weight": tensor.shape for name, tensor in weights.items()}
        wanted |= {
            name: tensor.shape for name, tensor in side.items() if name not in clips or name in self.tensors
        }
        self.check(wanted)
        new_weights = {name: self._tensor(f"{name}.weight") for name in weights}
        kept = {
            name for name in side if name in self.tensors and self.tensors[name].shape == side[name].shape
        }
        return new_weights, {name: self._tensor(name) if name in kept else side[name] for name in side}

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse tensors that are missing, of another shape or not finite, by name."""
        if missing := [name for name in wanted if name not in self.tensors]:
            raise WarmStartError(
                f"{self.source} has no {_few(missing)}: it is of another network; name the one it is of"
            )
        for name, shape in wanted.items():
            if (found := self.tensors[name].shape) != shape:
                raise WarmStartError(
                    f"{name} has shape {found} in {self.source} and {shape} in the network: give the network "
                    "as many classes and channels as those weights have"
                )
            if not np.isfinite(self.tensors[name]).all():
                raise WarmStartError(f"{name} in {self.source} holds a NaN or an infinity")

    def _tensor(self, name: str) -> NDArray[np.float32]:
        return np.array(self.tensors[name], np.float32)


def read_weights(path: str | Path) -> EarlierWeights:
    """A state dict (.pt, .pth), or a simulation's checkpoint or the folder it is in."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / CHECKPOINT
    if not file.is_file():
        raise WarmStartError(
            f"there are no weights at {file}; name a state dict (.pt) or the folder of a run"
        )
    if file.suffix in STATE_DICTS:
        return EarlierWeights(str(file), _state_dict(file))
    if not zipfile.is_zipfile(file):
        raise WarmStartError(f"{file} is neither a state dict ({', '.join(STATE_DICTS)}) nor a checkpoint")
    try:
        with file.open("rb") as opened:
            arrays = read_arrays(opened, str(file))
        if "graph" not in arrays:
            raise WarmStartError(f"{file} is no checkpoint of a run: it holds no graph")
        tensors = Tensors.from_arrays(Graph.from_bytes(arrays["graph"].tobytes()), arrays)
    except (ArchiveError, GraphError) as error:
        raise WarmStartError(f"{file} cannot be used as a checkpoint: {error}") from None
    final = tensors.average or tensors
    return EarlierWeights.of_model(str(file), final.weights, final.side)


def load_into(module: nn.Module, earlier: EarlierWeights) -> None:
    """Put these tensors into a module; every parameter and statistic of it must be there with its shape."""
    import torch

    own = module.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items() if tensor.is_floating_point()}
    earlier.check(wanted)
    with torch.no_grad():
        for name in wanted:
            own[name].copy_(torch.from_numpy(np.array(earlier.tensors[name], np.float32)))


def _state_dict(file: Path) -> dict[str, NDArray[Any]]:
    """Tensors alone: nothing in the file is run."""
    import torch

    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise WarmStartError(
            f"{file} cannot be read as a state dict: {' '.join(str(error).split())[:200]}; save it with "
            "torch.save(module.state_dict(), FILE)"
        ) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise WarmStartError(f"{file} holds a {type(found).__name__}; save module.state_dict()")
    return {
        name: tensor.detach().float().numpy()
        for name, tensor in found.items()
        if isinstance(tensor, torch.Tensor)
    }


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
