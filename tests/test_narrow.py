"""Tables in terminals of any width: a column is there as a whole, or left out and named."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fedge.cli.narrow import show

HEAD = [
    *("algorithm", "runs", "rounds", "final\nacc %", "best\nacc %", "final\nworst_recall", "MB", "device\ns"),
    *("energy\nJ", "rounds\nto 80 %", "MB\nto 80 %"),
]
ROWS = [
    ["averaged fedbuff fedavg lr=0.03", "3", "1 of 3 runs unfinished: 1 of 30", "93.7±0.9", "94.1±0.8", "0.9123±0.01",
     "12.34±0.11", "2.65±0.12", "7.02±5.78", "12.3±1.5\n(2 of 3)", "2.28±0.07"],
    ["fedavg lr=0.001", "3", "30", "60.2±10.4", "66.0±1.2", "0.8211±0.12",
     "8.40±0.01", "3.82±0.21", "111±12", "–", "–"],
]  # fmt: skip


@pytest.mark.parametrize("width", [60, 72, 80, 90, 100, 120, 160])
def test_no_cell_is_cut(width: int) -> None:
    text = io.StringIO()
    show(Console(file=text, width=width), HEAD, ROWS, ["worst_recall"], "elsewhere")
    said = text.getvalue()
    assert max(map(len, said.split("no room for")[0].splitlines())) <= width
    gone = re.sub(r"\s+", " ", said.split("no room for ")[1]) if "no room for" in said else ""
    for at, title in enumerate(HEAD):
        named = " ".join(title.split()) in gone
        cells = [line for row in ROWS for line in row[at].split("\n")]
        if at > 2:
            assert named or all(cell in said for cell in cells), title
    assert "93.7±0.9" in said, "the first result stays"
