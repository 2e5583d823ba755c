"""Training samples of clients that are too many to deal to: each client's are drawn when it is asked for."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedmpq.lab.partition import Indices, PartitionError, PartsOnDemand, check_alpha


class DrawnPartition(PartsOnDemand):
    """`samples` sorted indices for each client, drawn from Philox keyed by (seed, client).

    Client n has each class c with probability `q_c ~ n_c * G_c`, where `n_c` is the number of images of the
    class and the `G_c` are independent draws of Gamma(alpha); alpha = inf: `q_c ~ n_c`. That is what the
    classes of one client of `dirichlet_partition` tend to when clients become many. Of each class a client
    has no image twice, unless it has more than there are; two clients may have the same.
    """

    def __init__(
        self, labels: NDArray[np.int64], clients: int, alpha: float, seed: int, samples: int
    ) -> None:
        check_alpha(alpha)
        if labels.ndim != 1 or not len(labels):
            raise PartitionError(f"labels of shape {labels.shape} give clients nothing to draw from")
        super().__init__(clients)
        self._alpha, self._seed, self._samples = alpha, seed, samples
        _, class_of = np.unique(labels, return_inverse=True)
        # The indices of class c are order[ends[c - 1] : ends[c]].
        self._order = np.argsort(class_of, kind="stable")
        self._sizes = np.bincount(class_of)
        self._ends = np.cumsum(self._sizes)

    def part(self, client: int) -> Indices:
        key = np.array([self._seed % 2**64, client], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        counts = random.multinomial(self._samples, self._shares(random))
        pieces = [self._drawn(random, int(c), int(counts[c])) for c in np.flatnonzero(counts)]
        return np.sort(np.concatenate(pieces))

    def _shares(self, random: np.random.Generator) -> NDArray[np.float64]:
        if math.isinf(self._alpha):
            return np.asarray(self._sizes / self._sizes.sum(), np.float64)
        # Gamma(a) is Gamma(a + 1) * U^(1/a); by logarithms, because a small alpha makes all of them zero.
        logs = np.log(random.standard_gamma(self._alpha + 1, len(self._sizes)))
        logs += np.log1p(-random.random(len(self._sizes))) / self._alpha + np.log(self._sizes)
        shares = np.exp(logs - logs.max())
        return np.asarray(shares / shares.sum(), np.float64)

    def _drawn(self, random: np.random.Generator, of_class: int, count: int) -> Indices:
        size = int(self._sizes[of_class])
        places = random.choice(size, count, replace=count > size)
        return np.asarray(self._order[self._ends[of_class] - size + places], np.int64)
