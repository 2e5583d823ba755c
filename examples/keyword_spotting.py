"""Keyword spotting: MLPerf Tiny's DS-CNN over boards of 2, 4 and 8 bits per weight, beside full precision.

The words are made here: voices of their own pitch and throat say sequences of vowels, hisses and stops, with
noise around them. A second of sound becomes 49 frames of 10 log-mel bands, as WAV files do (docs/data.md).

python examples/keyword_spotting.py            a minute or so
python examples/keyword_spotting.py --quick    a glance
"""

import sys

import numpy as np
from beside_fp32 import compare
from numpy.typing import NDArray

import fedmpq
from fedmpq.data.sound import log_mel

RATE = 16_000
# Formants of vowels in hertz; bands of hisses.
VOWELS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}
HISSES = {"s": (4500, 7500), "f": (1500, 7000), "x": (2000, 3800)}
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
SPELT = ("ies", "nou", "u.", "daun", "lef.", "rai.", "on", "of", "s.o.", ".ou")
CLASSES = (*WORDS, "silence", "unknown")

Random = np.random.Generator
Sound = NDArray[np.float64]


def noise(random: Random, count: int, low: float, high: float) -> Sound:
    spectrum = np.fft.rfft(random.normal(0, 1, count))
    hertz = np.fft.rfftfreq(count, 1 / RATE)
    return np.fft.irfft(spectrum * ((hertz >= low) & (hertz <= high)), count)


def voiced(random: Random, count: int, formants: tuple[float, ...], pitch: float) -> Sound:
    """Harmonics of a gliding pitch, as loud as the formants let them through."""
    phase = 2 * np.pi * np.cumsum(pitch * np.linspace(1.05, 0.92, count)) / RATE
    harmonics = np.arange(1, int(4000 / pitch))
    gains = sum(1 / (1 + ((harmonics * pitch - formant) / 90) ** 2) for formant in formants)
    return np.sin(phase[:, None] * harmonics) @ (gains * random.uniform(0.7, 1.3, len(harmonics)))


def said(random: Random, spelling: str) -> Sound:
    """A word in a voice of its own, somewhere in a second with noise."""
    pitch, throat, pace = random.uniform(90, 240), random.uniform(0.88, 1.15), random.uniform(0.8, 1.25)
    parts = []
    for sound in spelling:
        count = int(RATE * pace * random.uniform(0.09, 0.14))
        if sound == ".":
            part = np.concatenate([np.zeros(count // 2), noise(random, count // 3, 500, 6000)])
        elif sound in HISSES:
            part = noise(random, count, *HISSES[sound]) * 1.5
        else:
            formants = VOWELS.get(sound, (250, 1100 if sound in "nmd" else 1500))
            part = voiced(random, count, tuple(throat * each for each in formants), pitch)
            part *= 1.0 if sound in VOWELS else 0.4
        parts.append(part * np.hanning(len(part)) ** 0.3)
    word, second = np.concatenate(parts)[:RATE], np.zeros(RATE)
    start = random.integers(0, RATE - len(word) + 1)
    second[start : start + len(word)] = word / np.abs(word).max() * random.uniform(0.1, 0.5)
    return second


def recordings(count: int, seed: int) -> fedmpq.Dataset:
    """Log-mel features of `count` seconds, all classes equally often."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % len(CLASSES))
    codes = np.zeros((count, 49, 10, 1), np.uint8)
    for index, label in enumerate(labels):
        if label < len(WORDS):
            sound = said(random, SPELT[label])
        elif CLASSES[label] == "unknown":
            sound = said(random, "".join(random.permutation(list("aeiousfxnl."))[: random.integers(2, 5)]))
        else:
            sound = np.zeros(RATE)
        sound += noise(random, RATE, 50, random.uniform(500, 7900)) * random.uniform(0.002, 0.05)
        codes[index, :, :, 0] = log_mel(sound, RATE, 49, 10)
    return fedmpq.Dataset(codes, labels, CLASSES)


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    train, test = recordings(96 if quick else 1800, seed=1), recordings(48 if quick else 600, seed=2)
    compare("ds_cnn", train, test, rounds=8, epochs=3, quick=quick, code_learning_rate=0.2)
