"""Anomaly detection: MLPerf Tiny's autoencoder learns how fans sound, and tells what sounds otherwise.

The sounds are made here: fans of a speed of their own hum and rush; those that are not well have a bearing
that clicks, a blade that rubs, or a loose part that whistles along. What boards hear is 5 frames of 128
log-mel bands; they learn from fans that are well, and the error of the reconstruction tells the others.

python examples/anomaly_detection.py            a minute or so
python examples/anomaly_detection.py --quick    a glance
"""

import sys

import numpy as np
from beside_fp32 import compare
from numpy.typing import NDArray

import fedmpq
from fedmpq.data.sound import log_mel

RATE = 16_000
COUNT = int(0.11 * RATE)
CLASSES = ("normal", "anomaly")

Random = np.random.Generator
Sound = NDArray[np.float64]


def noise(random: Random, middle: float, width: float) -> Sound:
    """As loud at a frequency as it is near the middle, on a logarithmic scale."""
    hertz = np.fft.rfftfreq(COUNT, 1 / RATE) + 1.0
    shape = np.exp(-((np.log2(hertz / middle) / width) ** 2))
    rushing = np.fft.irfft(np.fft.rfft(random.normal(0, 1, COUNT)) * shape, COUNT)
    return rushing / np.abs(rushing).max()


def fan(random: Random) -> Sound:
    seconds, speed = np.arange(COUNT) / RATE, random.uniform(110, 150)
    harmonics = np.arange(1, 12)
    turns = 2 * np.pi * speed * seconds[:, None] * harmonics + random.uniform(0, 7, len(harmonics))
    hum = np.sin(turns) @ (0.25 / harmonics)
    return hum + random.uniform(0.15, 0.25) * noise(random, 900, 1.6)


def fault(random: Random) -> Sound:
    seconds, kind = np.arange(COUNT) / RATE, random.integers(3)
    if kind == 0:
        clicks = (seconds * random.uniform(60, 140) + random.random()) % 1.0
        return 0.4 * np.exp(-clicks * 20) * noise(random, 4500, 0.5)
    if kind == 1:
        return random.uniform(0.1, 0.2) * noise(random, random.uniform(2500, 6000), 0.25)
    pitch = random.uniform(1500, 4000)
    return (
        0.08 * np.sign(np.sin(2 * np.pi * pitch * seconds)) * (0.6 + 0.4 * np.sin(2 * np.pi * 30 * seconds))
    )


def recordings(count: int, anomalies: int, seed: int) -> fedmpq.Dataset:
    """`count` pictures of 5 frames and 128 bands, of which the last `anomalies` are of fans with a fault."""
    random = np.random.default_rng(seed)
    labels = (np.arange(count) >= count - anomalies).astype(np.int64)
    codes = np.zeros((count, 5, 128, 1), np.uint8)
    for index, label in enumerate(labels):
        sound = fan(random) + (fault(random) if label else 0.0)
        codes[index, :, :, 0] = log_mel(sound * random.uniform(0.3, 0.6), RATE, 5, 128)
    return fedmpq.Dataset(codes, labels, CLASSES)


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    train = recordings(64 if quick else 4000, 0, seed=1)
    test = recordings(40, 20, seed=2) if quick else recordings(800, 400, seed=2)
    compare(
        "autoencoder",
        train,
        test,
        rounds=8,
        epochs=8,
        quick=quick,
        task="reconstruction",
        learning_rate=0.05,
        fp32_learning_rate=0.05,
        code_learning_rate=0.1,
    )
