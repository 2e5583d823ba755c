import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpq.server import incoming as incoming_module
from fedmpq.server.accepting import SMALL_BYTES
from fedmpq.server.blobs import Uploads
from fedmpq.server.incoming import Incoming, Memory
from tests.waiting import until

CLIENT, NAME = "c" * 32, bytes(32)


def opened(folder: Path, most: int = 1 << 20, at: int = 0) -> tuple[Incoming, Uploads, Memory]:
    uploads, memory = Uploads(folder), Memory(most)
    return Incoming(uploads, memory, CLIENT, NAME, at), uploads, memory


def test_a_short_upload_touches_no_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        upload, uploads, memory = opened(tmp_path)
        for part in (b"01", b"234", b""):
            await upload.add(part)
        assert (upload.at, memory.held) == (5, 5)
        assert await upload.whole() == b"01234"
        assert not uploads.may_have(CLIENT)
        await upload.drop()
        assert memory.held == 0

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=12), max_size=12), st.integers(0, 40), st.data())
def test_what_breaks_off_is_in_the_file_to_the_byte(
    tmp_path: Path, parts: list[bytes], most: int, data: st.DataObject
) -> None:
    """Whatever fits in memory, and whenever it is asked for."""
    kept = [data.draw(st.booleans()) for _ in parts]

    async def scenario() -> None:
        Uploads(tmp_path).keep_only(())
        upload, uploads, memory = opened(tmp_path, most)
        for part, ask in zip(parts, kept, strict=True):
            await upload.add(part)
            if ask:
                await upload.keep()
        everything = b"".join(parts)
        assert upload.at == len(everything)
        await upload.keep_what_can_be()
        assert uploads.stored(CLIENT, NAME) == len(everything)
        again = Incoming(uploads, memory, CLIENT, NAME, len(everything))
        await again.begin()
        await again.add(b"and more")
        path = await again.whole()
        assert isinstance(path, Path)
        assert path.read_bytes() == everything + b"and more"
        assert memory.held == 0
        await again.drop()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(scenario())


def test_what_is_being_written_has_arrived(tmp_path: Path) -> None:
    async def scenario() -> None:
        upload, uploads, _ = opened(tmp_path)
        written, write = threading.Event(), uploads.write

        def slow(*what: Any) -> None:
            assert written.wait(60)
            write(*what)

        uploads.write = slow  # type: ignore[method-assign, assignment]
        await upload.add(b"all")
        late = asyncio.ensure_future(upload.keep_what_can_be())
        for _ in range(5):
            await asyncio.sleep(0)
            assert upload.at == 3
        written.set()
        whole = await upload.whole()
        assert isinstance(whole, Path)
        assert whole.read_bytes() == b"all"
        await late

    asyncio.run(scenario())


def test_a_large_upload_goes_to_its_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        upload, uploads, memory = opened(tmp_path)
        await upload.add(bytes(SMALL_BYTES))
        await upload.add(b"x")
        assert uploads.stored(CLIENT, NAME) == SMALL_BYTES + 1
        assert memory.held == 0
        assert isinstance(await upload.whole(), Path)

    asyncio.run(scenario())


def test_what_does_not_come_quickly_goes_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_module, "QUICK_SECONDS", 0.01)

    async def scenario() -> None:
        upload, uploads, _ = opened(tmp_path)
        await upload.add(b"half")
        await asyncio.to_thread(until, lambda: uploads.stored(CLIENT, NAME) == 4)
        await upload.add(b" and half")
        whole = await upload.whole()
        assert isinstance(whole, Path)
        assert whole.read_bytes() == b"half and half"

    asyncio.run(scenario())
