"""`fedmpq.quantize`: a network trained elsewhere, in mixed precision under a bit budget. No federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.method.post_training import QuantizeError, quantize_model
from fedmpq.method.trained_network import DEFAULT_ACTIVATION_BITS, Normalisation, read_network
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from torch import nn


def quantize(
    module: nn.Module,
    budget: float,
    calibration: NDArray[np.uint8] | Dataset,
    *,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    activation_bits: int = DEFAULT_ACTIVATION_BITS,
    class_names: Sequence[str] = (),
    task: Task = CLASSIFICATION,
) -> DeployedModel:
    """The trained `module` as an integer model of at most `budget` bits per weight on average.

    `calibration` are some hundreds of images like those it will see, uint8 `(N, H, W, C)`; labels are not
    needed. `mean` and `std` are those the network was trained with, of pixels in 0..1, as in torchvision's
    `Normalize`; the default is `ToTensor` alone. `task` says what the outputs are, see docs/tasks.md. The
    module is left as it was.
    """
    images, names = _images(calibration, class_names)
    if images.ndim != 4:
        raise QuantizeError(f"the calibration images have shape {images.shape}; give (N, H, W, C)")
    height, width, channels = images.shape[1:]
    trained = read_network(module, (height, width, channels), Normalisation(mean, std), activation_bits, task)
    return quantize_model(trained, budget, images, names)


def _images(
    calibration: NDArray[np.uint8] | Dataset, class_names: Sequence[str]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    if isinstance(calibration, Dataset):
        return calibration.images, tuple(class_names) or calibration.class_names
    return np.asarray(calibration), tuple(class_names)
