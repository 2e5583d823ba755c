"""Bring data of your own: anything that gives (image, label) by index, as torch's data sets do.

The same class serves the command line: fedmpq simulate --data examples.own_data:Stripes --model digits_cnn
"""

import numpy as np
from numpy.typing import NDArray

import fedmpq


class Stripes:
    """Upright, lying and slanted stripes, drawn when they are asked for."""

    classes = ("upright", "lying", "slanted")

    def __init__(self, count: int = 240) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        random, label = np.random.default_rng(index), index % 3
        rows, columns = np.mgrid[:12, :12]
        along = (columns, rows, rows + columns)[label] + random.integers(6)
        stripes = np.where(along % 6 < 3, 170, 60) + random.integers(0, 50, (12, 12))
        return stripes.astype(np.uint8), label


if __name__ == "__main__":
    run = fedmpq.simulate("digits_cnn", Stripes(), budgets=[2, 4, 8], rounds=3, epochs=2, batch_size=16)
    print(run.history)
