"""Image classification: MLPerf Tiny's ResNet-8 over boards of 2, 4 and 8 bits per weight, beside fp32.

The pictures have CIFAR-10's size and show handwritten digits (scikit-learn's, which come along) as house
numbers do: in light colours on dark ones, larger or smaller, with parts of their neighbours beside them.

python examples/image_classification.py            a minute or so
python examples/image_classification.py --quick    a glance
"""

import sys

import numpy as np
from beside_fp32 import compare
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

import fedmpq

SIDE = 32

Ink = NDArray[np.float64]
Random = np.random.Generator


def put(page: Ink, digit: Ink, size: int, left: int, top: int) -> None:
    """Writes a digit of `size` pixels at a place that may lie partly outside the page."""
    grown = np.asarray(Image.fromarray((digit * 15.9375).astype(np.uint8)).resize((size, size))) / 255
    rows, columns = (np.arange(size) + first for first in (top, left))
    inside = np.ix_((rows >= 0) & (rows < SIDE), (columns >= 0) & (columns < SIDE))
    place = page[max(0, top) : max(0, top + size), max(0, left) : max(0, left + size)]
    place[...] = np.maximum(place, grown[inside])


def picture(random: Random, digit: Ink, others: Ink) -> NDArray[np.uint8]:
    page, size = np.zeros((SIDE, SIDE)), int(random.integers(20, 33))
    left, top = (int(random.integers(-2, SIDE - size + 3)) for _ in range(2))
    put(page, digit, size, left, top)
    for side in (-1, 1):
        if random.random() < 0.3:
            neighbour = others[random.integers(len(others))]
            put(page, neighbour, size, left + side * (size - int(random.integers(2))), top)
    ink, paper = random.uniform(130, 255, 3), random.uniform(0, 110, 3)
    colours = paper + page[:, :, None] * (ink - paper) + random.normal(0, 14, (SIDE, SIDE, 3))
    return np.clip(colours, 0, 255).astype(np.uint8)


def house_numbers(digits: Ink, labels: NDArray[np.int64], seed: int) -> fedmpq.Dataset:
    random = np.random.default_rng(seed)
    images = np.stack([picture(random, digit, digits) for digit in digits])
    return fedmpq.Dataset(images, labels, tuple("0123456789"))


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    known = load_digits()
    images, labels = known.images, known.target.astype(np.int64)
    # The last ones were written by people who wrote none of the others.
    first, last = (60, 40) if quick else (1400, 397)
    train = house_numbers(images[:first], labels[:first], seed=1)
    test = house_numbers(images[-last:], labels[-last:], seed=2)
    rates = {"learning_rate": 0.05, "code_learning_rate": 0.2}
    compare("resnet8", train, test, rounds=6, epochs=4, quick=quick, **rates)
