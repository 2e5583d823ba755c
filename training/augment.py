"""Random crops, flips and orders as pure functions of uniform numbers: equal numbers, equal batches.

The caller draws the numbers from the counter-based generator; nothing here holds a state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pad_crop_flip(
    images: NDArray[np.uint8], uniforms: NDArray[np.float32], pad: int, fill: int, flip: bool = True
) -> NDArray[np.uint8]:
    """Shift each image of a (N, H, W, C) batch by up to `pad` pixels and mirror half of them.

    Image n is padded by `pad` pixels of value `fill` (the zero point, i.e. real 0) on all sides and cropped
    back to H x W at row floor(u[n,0] * (2 pad + 1)), column floor(u[n,1] * (2 pad + 1)); it is then
    mirrored left-right if u[n,2] < 1/2. `uniforms` is (N, 3) in [0, 1); with `flip` off, u[n,2] is not
    looked at.
    """
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(f"images are {images.dtype} of shape {images.shape}, must be uint8 (N, H, W, C)")
    if pad < 0 or not 0 <= fill <= 255:
        raise ValueError(f"pad is {pad}, must be 0 or more; fill is {fill}, must lie in 0..255")
    count, height, width, channels = images.shape
    _check_uniforms(uniforms, (count, 3))
    padded = np.full((count, height + 2 * pad, width + 2 * pad, channels), fill, np.uint8)
    padded[:, pad : pad + height, pad : pad + width] = images
    # float64 holds the product exactly, so a uniform just below 1 cannot round up to an offset of 2 pad + 1.
    offsets = (uniforms[:, :2].astype(np.float64) * (2 * pad + 1)).astype(np.int64)
    rows = offsets[:, 0, None] + np.arange(height)
    columns = offsets[:, 1, None] + np.arange(width)
    if flip:
        columns = np.where(uniforms[:, 2, None] < 0.5, columns[:, ::-1], columns)
    cropped: NDArray[np.uint8] = padded[
        np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]
    ]
    return cropped


def epoch_order(n: int, uniforms: NDArray[np.float32]) -> NDArray[np.int64]:
    """A permutation of 0..n-1: the stable argsort of `uniforms`, (n,) in [0, 1); ties keep their order."""
    _check_uniforms(uniforms, (n,))
    return np.argsort(uniforms, kind="stable").astype(np.int64)


def _check_uniforms(uniforms: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    if uniforms.dtype != np.float32 or uniforms.shape != shape:
        raise ValueError(
            f"uniforms are {uniforms.dtype} of shape {uniforms.shape}, must be float32 of shape {shape}"
        )
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
