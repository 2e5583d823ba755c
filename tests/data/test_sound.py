"""Log-mel features against a slow transform by the definition; every width and rate of a WAV file."""

from __future__ import annotations

import math
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedmpq.data.data_source import load_form
from fedmpq.data.dataset import DataError
from fedmpq.data.fitting import Form
from fedmpq.data.open_source import load, open_source
from fedmpq.data.sound import BANDS, FRAMES, log_mel, read_wave


def tone(hertz: float, seconds: float = 1.0, rate: int = 16000) -> NDArray[np.float64]:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def save(
    path: Path, sound: NDArray[np.float64], rate: int = 16000, width: int = 2, channels: int = 1
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = [int(value * ((1 << (8 * width - 1)) - 1)) for value in sound for _ in range(channels)]
    if width == 1:
        data = bytes(value + 128 for value in whole)
    else:
        data = b"".join(struct.pack("<i", value)[:width] for value in whole)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


def slow_log_mel(sound: NDArray[np.float64], rate: int, frame: int, bands: int) -> list[float]:
    """Codes of one frame before they are rounded: every sum written out."""
    length, hop = round(0.03 * rate), round(0.02 * rate)
    size = 1 << (length - 1).bit_length()
    hann = [0.5 - 0.5 * math.cos(2 * math.pi * n / length) for n in range(length)]
    piece = [float(v) for v in sound[frame * hop : frame * hop + length]]
    piece += [0.0] * (length - len(piece))
    powers = []
    for k in range(size // 2 + 1):
        angles = -2j * math.pi * k / size * np.arange(length)
        powers.append(abs(np.sum(np.array(piece) * hann * np.exp(angles))) ** 2 / sum(hann) ** 2)

    def mel(f: float) -> float:
        return 2595 * math.log10(1 + f / 700)

    ends = [mel(20), mel(7600)]
    points = [
        700 * (10 ** ((ends[0] + i * (ends[1] - ends[0]) / (bands + 1)) / 2595) - 1) for i in range(bands + 2)
    ]
    out = []
    for b in range(bands):
        low, middle, high = points[b : b + 3]
        total = 0.0
        for k, power in enumerate(powers):
            f = k * rate / size
            total += power * max(0.0, min((f - low) / (middle - low), (high - f) / (high - middle)))
        out.append(min(255.0, (10 * math.log10(max(total, 1e-8)) + 80) * 255 / 80))
    return out


@pytest.mark.parametrize("rate", [8000, 16000, 22050])
def test_features_are_those_of_the_definition(rate: int) -> None:
    random = np.random.default_rng(rate)
    sound = tone(440, 0.2, rate) + 0.1 * random.standard_normal(round(0.2 * rate))
    codes = log_mel(sound, rate, 12, 10)
    for frame in (0, 4, 9):
        assert np.abs(codes[frame] - np.array(slow_log_mel(sound, rate, frame, 10))).max() <= 0.5 + 1e-6
    assert codes[11].max() == 0, "silence follows a recording that is too short"


def test_rate_width_and_channels_hardly_matter(tmp_path: Path) -> None:
    wanted = log_mel(tone(1000), 16000, FRAMES, BANDS).astype(int)
    loud = wanted > 100
    for rate, width, channels in ((16000, 2, 2), (16000, 3, 1), (16000, 4, 1), (16000, 1, 1), (44100, 2, 1)):
        path = save(tmp_path / f"{rate}-{width}.wav", tone(1000, rate=rate), rate, width, channels)
        found = log_mel(*read_wave(str(path)), FRAMES, BANDS).astype(int)
        assert np.abs(found - wanted)[loud].max() <= (12 if rate != 16000 else 2)


def test_class_folders_of_recordings(tmp_path: Path) -> None:
    for n in range(3):
        save(tmp_path / "low" / f"{n}.wav", tone(200 + n))
        save(tmp_path / "high" / f"{n}.WAV", tone(3000 + n))
    (tmp_path / "low" / "broken.wav").write_bytes(b"RIFF nonsense")
    data = load(tmp_path, "train")
    assert data.image_shape == (FRAMES, BANDS, 1)
    assert data.class_names == ("high", "low")
    assert data.labels.tolist() == [0] * 3 + [1] * 3
    assert [Path(path).name for path, _ in data.skipped] == ["broken.wav"]
    assert data.images[0].mean(axis=0).argmax() > data.images[-1].mean(axis=0).argmax()
    source = open_source(tmp_path)
    fitted = load_form(source, "a", "train", Form(20, 16, 1))
    assert np.array_equal(
        fitted.images[3, :, :, 0], log_mel(*read_wave(str(tmp_path / "low" / "0.wav")), 20, 16)
    )
    with pytest.raises(DataError, match="1 channel, the model takes 3"):
        load_form(source, "a", "train", Form(20, 16, 3))
