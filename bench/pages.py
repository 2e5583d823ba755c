"""The parts of documents that measurements write, between two lines that mark them."""

from __future__ import annotations

import datetime

from bench.machine import Machine


def with_generated(page: str, generated: str, begin: str, end: str) -> str:
    """The page with what stands between the markers `begin` and `end` replaced."""
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks its markers; it needs the lines {begin!r} and {end!r}")
    return f"{head}{begin}\n{generated}\n{end}{tail}"


def measured_on(machine: Machine) -> str:
    """When and on what something was measured, as the beginning of a paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return (
        f"Measured {today} on {machine.cpu_model} ({machine.system}), {machine.cores} cores,"
        f" {machine.memory_gb} GB; {versions}."
    )
