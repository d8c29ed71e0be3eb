"""The documentation is true: its code runs, its commands and experiment files parse, its links lead somewhere.

Warnings are errors here as in all tests (pyproject.toml).
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from fedge.algorithms import ALGORITHMS
from fedge.cli.app import app
from fedge.experiment import load, parse

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("README.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of every fenced block in that language."""
    text = page.read_text("utf-8")
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(text) if m[1] == language]


def commands(page: Path) -> list[str]:
    """Every `fedge ...` in the console blocks, prompts taken off."""
    lines = [line.removeprefix("$ ") for _, text in blocks(page, "console") for line in text.splitlines()]
    return [line for line in lines if line.split()[:1] == ["fedge"]]


def links(page: Path) -> list[str]:
    """Links to files of this repository, outside of code."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text("utf-8")))
    return [link.split("#")[0] for link in LINK.findall(text) if not re.match(r"#|[a-z]+:", link)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in PAGES if blocks(page, "python")]
COMMANDS = [pytest.param(one, id=f"{name(page)}: {one}") for page in PAGES for one in commands(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in order and in one namespace; errors carry the page's own line numbers."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where the types of dataclasses are looked up
    with patch.dict(ALGORITHMS):  # a page may enter its own
        for line, text in blocks(page, "python"):
            exec(compile("\n" * line + text, str(page), "exec"), vars(module))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    """The sub-command exists and knows the options (with --help nothing is run), and so do the settings."""
    words = shlex.split(command, comments=True)[1:]
    found = CliRunner().invoke(app, [*words, "--help"])
    assert found.exit_code == 0, found.output
    if words[0] == "run" and not any(word.endswith(".toml") for word in words):
        load(None, [words[at + 1] for at, word in enumerate(words) if word == "--set"])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_experiment_files_parse(page: Path) -> None:
    for _, text in blocks(page, "toml"):
        parse(tomllib.loads(text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    assert not missing, f"{name(page)} links to {missing}"


def test_every_page_is_in_the_index() -> None:
    listed = set(links(ROOT / "docs" / "README.md"))
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"} <= listed
