"""What a card tells of how samples became codes."""

from __future__ import annotations

from pathlib import Path

from fedmpq.data.data_card import data_facts
from fedmpq.data.value_range import parse_range
from tests.data.files import pixels, save_image
from tests.data.test_sound import save, tone


def test_photos_sounds_and_ranges_are_told(tmp_path: Path) -> None:
    save_image(tmp_path / "photos" / "a" / "0.png", pixels(4, 4, 3))
    save(tmp_path / "sounds" / "a" / "0.wav", tone(440, 0.1))
    assert data_facts(str(tmp_path / "photos"), None)["data"]["kind"] == "photos"
    assert data_facts(str(tmp_path / "sounds"), None)["data"]["hop_seconds"] == 0.02
    told = data_facts("digits", parse_range("0..1,-2..2"))["data"]
    assert told["range"] == [[0.0, 1.0], [-2.0, 2.0]]
    assert (
        data_facts(None, None) == data_facts(str(tmp_path / "gone"), None) == data_facts("digits", None) == {}
    )
