"""Visual wake words: is there a person? MLPerf Tiny's MobileNetV1 over boards of 2, 4 and 8 bits per weight.

The pictures are drawn here: rooms and streets of rectangles and blobs, in half of them a person of any size,
pose and clothes, in the others a tree, a lamp or a car made of the same parts.

python examples/visual_wake_words.py            two minutes or so
python examples/visual_wake_words.py --quick    a glance
"""

import sys

import numpy as np
from beside_fp32 import compare
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

import fedmpq

SIDE = 96
CLASSES = ("nobody", "person")

Random = np.random.Generator
Canvas = ImageDraw.ImageDraw


def colour(random: Random) -> tuple[int, int, int]:
    """Of walls and things: any that is more green or blue than red."""
    red, green, blue = sorted(random.integers(20, 236, 3))
    return (int(red), int(green), int(blue)) if random.random() < 0.5 else (int(red), int(blue), int(green))


def skin(random: Random) -> tuple[int, int, int]:
    """Between dark and light."""
    share = random.random()
    red, green, blue = (
        int(dark + share * (light - dark)) for dark, light in ((90, 240), (55, 195), (40, 165))
    )
    return red, green, blue


def box(random: Random, least: int, most: int) -> list[int]:
    """A rectangle somewhere in the picture."""
    left, top = random.integers(-10, SIDE - 10, 2)
    width, height = random.integers(least, most, 2)
    return [int(left), int(top), int(left + width), int(top + height)]


def draw_person(random: Random, canvas: Canvas, x: float, y: float, size: float) -> None:
    """Feet near (x, y + size): a head, a trunk, and limbs that are anywhere."""
    shirt, trousers, face = colour(random), colour(random), skin(random)
    head, limb = 0.13 * size, max(2, int(0.09 * size))
    shoulder, hip = y + 0.3 * size, y + 0.6 * size
    for side in (-1, 1):
        hand = x + side * size * random.uniform(0.12, 0.4), shoulder + size * random.uniform(-0.25, 0.35)
        canvas.line([(x + side * 0.12 * size, shoulder), hand], fill=face, width=limb)
        foot = x + side * size * random.uniform(0.02, 0.2), y + size
        canvas.line([(x + side * 0.06 * size, hip), foot], fill=trousers, width=limb + 1)
    canvas.rounded_rectangle(
        [x - 0.15 * size, shoulder - 0.05 * size, x + 0.15 * size, hip], 0.06 * size, fill=shirt
    )
    canvas.ellipse([x - head, y, x + head, y + 2 * head], fill=face)


def draw_thing(random: Random, canvas: Canvas, x: float, y: float, size: float) -> None:
    """A tree, a lamp or a car."""
    first, second = colour(random), colour(random)
    kind = random.integers(3)
    if kind == 2:
        body = [x - 0.5 * size, y + 0.4 * size, x + 0.5 * size, y + 0.8 * size]
        canvas.rounded_rectangle(body, 5, fill=first)
        for side in (-0.3, 0.3):
            wheel = [x + (side - 0.13) * size, y + 0.68 * size, x + (side + 0.13) * size, y + 0.94 * size]
            canvas.ellipse(wheel, fill=second)
        return
    stem, crown = (0.1, 0.3) if kind == 0 else (0.04, 0.14)
    canvas.rectangle([x - stem * size, y + 0.2 * size, x + stem * size, y + size], fill=first)
    canvas.ellipse([x - crown * size, y, x + crown * size, y + 2.2 * crown * size], fill=second)


def picture(random: Random, label: int) -> NDArray[np.uint8]:
    image = Image.new("RGB", (SIDE, SIDE), colour(random))
    canvas = ImageDraw.Draw(image)
    canvas.rectangle([0, int(random.integers(40, 90)), SIDE, SIDE], fill=colour(random))
    for _ in range(random.integers(0, 3)):
        shape = canvas.rectangle if random.random() < 0.6 else canvas.ellipse
        shape(box(random, 6, 30), fill=colour(random))
    size = random.uniform(65, 92)
    place = random.uniform(30, SIDE - 30), random.uniform(0, SIDE - size)
    (draw_person if label else draw_thing)(random, canvas, *place, size)
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(0, 1)))
    noisy = np.asarray(image, np.float64) * random.uniform(0.6, 1.1) + random.normal(0, 4, (SIDE, SIDE, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def pictures(count: int, seed: int) -> fedmpq.Dataset:
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % 2)
    return fedmpq.Dataset(np.stack([picture(random, label) for label in labels]), labels, CLASSES)


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    train, test = pictures(24 if quick else 800, seed=1), pictures(12 if quick else 300, seed=2)
    # Scales and clips of so many thin layers bear small steps only; codes need large ones.
    rates = {"learning_rate": 0.02, "code_learning_rate": 0.2}
    compare("mobilenet_v1_025", train, test, rounds=12, epochs=3, quick=quick, **rates)
