"""Compression of uploads: full-precision training, quantized changes.

Each module is one quantizer: ``encode`` turns an update tensor into real bytes, ``decode`` turns them back.
All randomness is passed in as uniforms from the run's counter-based generator, so that a run repeats to the
bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class UpdateError(ValueError):
    """An update tensor, or the randomness given with it, that a quantizer cannot take."""


class PayloadError(ValueError):
    """Bytes that are no encoding of an update."""


def flat_update(delta: NDArray[np.float32]) -> NDArray[np.float64]:
    """The update as a flat float64 vector, refused if it is empty or not finite."""
    if delta.size == 0:
        raise UpdateError(f"the update has shape {delta.shape} and no weights; leave such a tensor out")
    if not np.isfinite(delta).all():
        raise UpdateError(
            "the update holds a NaN or an infinity; discard this client's round, its training diverged"
        )
    return np.ravel(delta).astype(np.float64)


def flat_uniforms(uniforms: NDArray[np.floating], count: int) -> NDArray[np.float64]:
    """The uniforms as a flat float64 vector, refused unless there are ``count`` of them, all in [0, 1)."""
    if uniforms.size != count:
        raise UpdateError(f"{uniforms.size} uniforms were given; this update needs exactly {count}")
    flat = np.ravel(uniforms).astype(np.float64)
    if not (flat.min() >= 0 and flat.max() < 1):
        raise UpdateError(f"uniforms lie in [{flat.min()}, {flat.max()}]; they must lie in [0, 1)")
    return flat
