"""How the training images are dealt to clients: Dirichlet label skew, or evenly."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

MAX_DRAWS = 1000
ALPHA_RANGE = (1e-3, 1e6)

Indices = NDArray[np.int64]


class PartitionError(ValueError):
    """Images that cannot be dealt as asked."""


class PartsOnDemand(Sequence[Indices]):
    """The samples of so many clients, each client's found when it is asked for."""

    def __init__(self, clients: int) -> None:
        self._clients = clients

    @abstractmethod
    def part(self, client: int) -> Indices:
        """Those of one client that there is."""

    def __len__(self) -> int:
        return self._clients

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Indices]: ...
    def __getitem__(self, client: int | slice) -> Indices | Sequence[Indices]:
        if isinstance(client, slice):
            return [self[one] for one in range(*client.indices(self._clients))]
        if not 0 <= client < self._clients:
            raise IndexError(f"there is no client {client} of {self._clients}")
        return self.part(client)


def dirichlet_partition(
    labels: NDArray[np.int64], clients: int, alpha: float, seed: int, min_per_client: int = 1
) -> list[Indices]:
    """Sorted indices for each client; every index of `labels` goes to exactly one.

    For each class c, q_c ~ Dirichlet(alpha, ..., alpha) over the clients; client k gets the images of that
    class, in random order, from floor(n_c * (q_c1 + ... + q_c,k-1)) up to floor(n_c * (q_c1 + ... + q_ck)).
    All q are drawn again, up to 1000 times, while some client has fewer than `min_per_client` images. alpha
    = inf deals each class round-robin: class counts and totals then differ by at most 1 between clients.
    The draws come from Philox(seed): equal arguments, equal parts.
    """
    _check(labels, clients, alpha, min_per_client)
    rng = np.random.Generator(np.random.Philox(seed))
    classes, class_of = np.unique(labels, return_inverse=True)
    by_class = [rng.permutation(np.flatnonzero(class_of == c)) for c in range(len(classes))]
    if math.isinf(alpha):
        order = np.concatenate(by_class)
        return [np.sort(order[client::clients]) for client in range(clients)]
    cuts = _draw_cuts(rng, np.array([len(members) for members in by_class]), clients, alpha, min_per_client)
    pieces = [np.split(members, cut[:-1]) for members, cut in zip(by_class, cuts, strict=True)]
    return [np.sort(np.concatenate([piece[client] for piece in pieces])) for client in range(clients)]


def class_histogram(labels: NDArray[np.int64], parts: Sequence[Indices], classes: int) -> NDArray[np.int64]:
    """(clients, classes): how many images of each class each part holds."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts]).astype(np.int64)


def _check(labels: NDArray[np.int64], clients: int, alpha: float, min_per_client: int) -> None:
    if clients < 1 or min_per_client < 0:
        raise PartitionError(
            f"{clients} clients of at least {min_per_client} images: at least 1 client and 0 images needed"
        )
    check_alpha(alpha)
    if labels.ndim != 1 or len(labels) < max(1, clients * min_per_client):
        raise PartitionError(
            f"labels of shape {labels.shape} cannot give {clients} clients {min_per_client} images each: "
            "use fewer clients or a smaller min_per_client"
        )


def check_alpha(alpha: float) -> None:
    """An error unless classes can be skewed by it."""
    low, high = ALPHA_RANGE
    if not (low <= alpha <= high or alpha == math.inf):
        raise PartitionError(f"alpha is {alpha}, must lie in {low:g}..{high:g}, or be inf for an even split")


def _draw_cuts(
    rng: np.random.Generator, sizes: NDArray[np.int64], clients: int, alpha: float, min_per_client: int
) -> NDArray[np.int64]:
    """(classes, clients): where each client's share of a class ends."""
    for _ in range(MAX_DRAWS):
        shares = np.cumsum(rng.dirichlet(np.full(clients, alpha), size=len(sizes)), axis=1)
        cuts = np.minimum(shares * sizes[:, None], sizes[:, None]).astype(np.int64)
        cuts[:, -1] = sizes  # the sum of the shares may round to just below 1
        if np.diff(cuts, prepend=0, axis=1).sum(axis=0).min() >= min_per_client:
            return cuts
    raise PartitionError(
        f"no draw of {MAX_DRAWS} gave each of {clients} clients {min_per_client} of {sizes.sum()} images at "
        f"alpha = {alpha:g}: use fewer clients, a larger alpha or a smaller min_per_client"
    )
