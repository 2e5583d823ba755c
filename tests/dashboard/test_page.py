"""The page's own files: small, and nothing of anybody else's in them."""

from __future__ import annotations

import re
import zlib
from importlib.metadata import files as files_of
from importlib.resources import files

from fedmpq.dashboard.app import PAGE

FIRST_LOAD = 200_000
TEXTS = {name: (files("fedmpq.dashboard") / "page" / name).read_text("utf-8") for name, _ in PAGE.values()}


def test_the_first_load_is_small() -> None:
    assert sum(len(text.encode()) for text in TEXTS.values()) < FIRST_LOAD / 2
    assert sum(len(zlib.compress(text.encode())) for text in TEXTS.values()) < FIRST_LOAD / 8


def test_no_file_names_another_host() -> None:
    for name, text in TEXTS.items():
        hosts = set(re.findall(r"(?:https?|wss?):?//([^/'\"` )]+)", text))
        assert hosts <= {"www.w3.org"}, name  # the name of SVG's vocabulary, which nobody asks for


def test_nothing_stands_in_the_page_that_the_policy_forbids() -> None:
    html = TEXTS["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", html)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", TEXTS["dashboard.js"]
    )
    assert 'setAttribute("style"' not in TEXTS["dashboard.js"]


def test_every_element_that_the_script_asks_for_is_there() -> None:
    asked = set(re.findall(r'\$\("([a-z-]+)"\)', TEXTS["dashboard.js"]))
    there = set(re.findall(r'\bid="([a-z-]+)"', TEXTS["index.html"]))
    assert asked <= there
    labels = set(re.findall(r'\b(?:for|aria-labelledby)="([a-z-]+)"', TEXTS["index.html"]))
    assert labels <= there


def test_every_class_of_a_colour_is_in_the_style() -> None:
    css = TEXTS["dashboard.css"]
    names = [f"c{number}" for number in range(8)] + [f"w{bits}" for bits in range(1, 9)]
    names += ["cmain", "cmuted", "o-trained", "o-late", "o-rejected", "o-declined", "o-none"]
    assert [name for name in names if not re.search(rf"\.{name}\b", css)] == []
    assert "prefers-color-scheme: dark" in css


def test_it_adds_little_to_a_server() -> None:
    """What fedmpq[dashboard] brings, byte code apart, which Python makes anew anywhere."""
    brought = ("starlette", "uvicorn", "anyio", "click", "h11", "idna")
    size = sum(
        file.size or 0 for name in brought for file in files_of(name) or () if not file.name.endswith(".pyc")
    )
    assert 0.5e6 < size < 5e6
