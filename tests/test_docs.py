"""The documentation is true: its code runs, its commands and experiment files parse, its links lead somewhere.

Warnings are errors here as in all tests (pyproject.toml).
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedge
from fedge.algorithms import ALGORITHMS, ASYNCHRONOUS
from fedge.cli.app import app
from fedge.data.catalogue import LOADERS
from fedge.experiment import load
from fedge.experiment.fields import fields_of
from fedge.experiment.own import marked
from fedge.experiment.parts import PARTS
from fedge.experiment.sweeps import read_sweep
from fedge.experiment.values import convert
from fedge.models import MODELS

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
        read_sweep(marked(tomllib.loads(text), ROOT / "examples" / "own_parts"))


def test_getting_started_shows_the_experiment_that_comes_with_fedge() -> None:
    ((_, shown),) = blocks(ROOT / "docs" / "getting-started.md", "toml")
    own = tomllib.loads((ROOT / "fedge" / "default.toml").read_text("utf-8"))
    assert read_sweep(tomllib.loads(shown)).first == read_sweep(own).first


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    assert not missing, f"{name(page)} links to {missing}"


# Tables


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    text = (ROOT / "docs" / page).read_text("utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_name_is_listed_with_its_defaults() -> None:
    listed: dict[str, set[str]] = {}
    for table, names, fields in rows("getting-started.md", "Names that a file can use"):
        part = PARTS[table.strip("`[]")]
        for one in re.findall(r"`(\w+)`", names):
            listed.setdefault(table.strip("`[]"), set()).add(one)
            known = fields_of(part.choices[one] if part.key else part.chosen({}, ""))
            for field, default in re.findall(r"`(\w+) = ([^`]+)`", fields):
                value = tomllib.loads(f"value = {default}")["value"]
                assert known[field].default == convert(value, known[field].hint), f"{one}: {field}"
    assert listed["algorithm"] == {*ALGORITHMS, *ASYNCHRONOUS}
    assert listed["model"] == set(MODELS)
    assert listed["partition"] == set(PARTS["partition"].offered)
    assert listed["data"] == set(LOADERS)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn_like(super().forward(x))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(12, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.line(x) / self.steps


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(12, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[:, None], torch.ones(len(x), dtype=torch.long), batch_first=True)
        return self.out(self.rnn(packed)[1][0][0])


def _train(model: nn.Module, x: Any = None, y: Any = None, **settings: Any) -> None:
    x = np.random.default_rng(0).standard_normal((60, 12)) if x is None else x
    y = np.arange(60) % 3 if y is None else y
    data = fedge.data.from_arrays(x, y, x, y)
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=3))
    fedge.train(fedge.FedAvg(model, **settings), federation, rounds=1)


NUMBERS = np.linspace(0, 1, 60)
DIGITS = fedge.data.load("digits")
MISTAKES: list[Callable[[], Any]] = [  # in the order of the table
    lambda: _train(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))),
    lambda: _train(Counting()),
    lambda: _train(Packing()),
    lambda: _train(Noisy(12, 3)),
    lambda: _train(nn.Linear(12, 3), np.ones((60, 12), "uint8")),
    lambda: _train(nn.Linear(12, 2)),
    lambda: fedge.data.from_arrays(NUMBERS, [0, 2] * 30, NUMBERS, [0, 1] * 30, classes=2),
    lambda: _train(nn.Linear(12, 1), y=NUMBERS, loss=fedge.cross_entropy),
    lambda: _train(nn.Linear(12, 3), loss=nn.functional.cross_entropy),
    lambda: _train(nn.Linear(12, 1), y=NUMBERS, loss=lambda out, y: (out - y) ** 2),
    lambda: _train(nn.Linear(12, 4), y=NUMBERS),
    lambda: _train(nn.Embedding(6, 6), np.zeros((60, 6), int), np.arange(360).reshape(60, 6) % 6),
    lambda: fedge.Federation(fedge.data.from_arrays(*[np.zeros(400)] * 4), fedge.partition.by_group([1, 2, 3])),
    lambda: _train(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)), lr=1e30),
    lambda: fedge.Federation(DIGITS, [np.ones(len(DIGITS.train_y), bool)]),
    lambda: fedge.train(
        fedge.FedOVA(fedge.FedAvg(fedge.models.mlp())),
        fedge.Federation(DIGITS, fedge.partition.iid(DIGITS.train_y, clients=10)),
        rounds=1,
    ),
]


MESSAGES = [row[0].strip("`") for row in rows("own-data-and-model.md", "Common errors")]


@pytest.mark.parametrize(("message", "mistake"), list(zip(MESSAGES, MISTAKES, strict=True)))
def test_common_errors_say_what_the_page_says(message: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        mistake()
    assert str(caught.value).startswith(message)


def test_every_page_is_in_the_index() -> None:
    listed = set(links(ROOT / "docs" / "README.md"))
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"} <= listed


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r": (docs/[\w-]+\.md)$", site, re.MULTILINE))
    assert named == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {"docs/README.md"}


def test_the_workflow_runs_what_contributing_asks_for() -> None:
    """The same commands on both roads; `make` alone starts none of them twice."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    ours = (ROOT / ".ci" / "run").read_text()

    def targets(text: str) -> list[str]:
        return [word for line in re.findall(r"^(?:\s*- run: )?make (.+)$", text, re.MULTILINE) for word in line.split()]

    assert targets(workflow) == targets(ours)
    assert len(targets(ours)) > 3


def test_the_version_is_said_once() -> None:
    said = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert said is not None
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == fedge.__version__ == said[1]


# The site


def test_the_reference_of_the_site_has_every_public_name() -> None:
    """Without building it: a page per module, each in the table of contents, each name with a docstring."""
    site = runpy.run_path(str(ROOT / "tools" / "site.py"))
    pages = dict(site["reference"]())
    contents = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [name for name in pages if f"reference/{name}" not in contents] == []
    named = set(re.findall(r"^::: ([\w.]+)$", "\n".join(pages.values()), re.MULTILINE))
    known = {f"{module}.{name}" for name, module in fedge._PLACE.items()}
    known |= {f"fedge.{module}.{name}" for module in fedge._MODULES for name in getattr(fedge, module).__all__}
    assert known <= named
    docs = [page for page in PAGES if page.parent.name == "docs" and page.name != "README.md"]
    assert [page.name for page in docs if f"docs/{page.name}" not in contents] == []
    listed = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert [page.name for page in docs if f"({page.name})" not in listed] == []
