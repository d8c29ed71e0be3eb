"""docs/uploads.md: its tables from the results, between markers; the text around them stays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.uploads.measure import CODECS, LIARS, PROBLEMS, RULES, lines

PAGE = Path(__file__).parents[2] / "docs/uploads.md"
TITLES = {"digits": "digits", "fmnist": "Fashion-MNIST"}


def write() -> None:
    text = PAGE.read_text()
    for name, content in (("codecs", codecs()), ("rules", rules())):
        text = filled(text, name, "python -m benchmarks.uploads", content)
    PAGE.write_text(text)


def filled(text: str, name: str, command: str, content: str) -> str:
    """A page with other content between the markers of this name."""
    begin, end = f"<!-- {name}: {command} -->\n", f"<!-- /{name} -->"
    head, rest = text.split(begin)
    return head + begin + content + end + rest.split(end, 1)[1]


def found(kind: str, problem: str, name: str) -> list[dict[str, Any]]:
    return [line for line in lines() if (line["kind"], line["problem"], line["name"]) == (kind, problem, name)]


def accuracy(some: list[dict[str, Any]]) -> str:
    if not some:
        return "not run"
    if any(line["final"] is None for line in some):
        return "collapses"
    values = [100 * line["final"] for line in some]
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def codecs() -> str:
    shown = [problem for problem in PROBLEMS if found("codec", problem, "as it is")]
    rows = [["upload", *(f"{TITLES[p]}: test accuracy, % | of the bytes up" for p in shown)]]
    for name in CODECS:
        cells = []
        for problem in shown:
            some, plain = found("codec", problem, name), found("codec", problem, "as it is")
            share = mean(line["up_bytes"] for line in some) / mean(line["up_bytes"] for line in plain) if some else None
            cells.append(f"{accuracy(some)} | {'' if share is None else f'1/{1 / share:.1f}'}")
        rows.append([name, *cells])
    return table(rows)


def rules() -> str:
    shown = [problem for problem in PROBLEMS if found("rule", problem, "Mean")]
    heads = (f"{TITLES[p]}: all honest, % | {LIARS} of 100 lie, %" for p in shown)
    rows = [["rule", *heads]]
    for name in RULES:
        cells = [f"{accuracy(found('rule', p, name))} | {accuracy(found('lies', p, name))}" for p in shown]
        rows.append([name, *cells])
    return table(rows)


def table(rows: list[list[str]]) -> str:
    text = [f"| {' | '.join(row)} |" for row in rows]
    columns = text[0].count("|") - 1
    return "\n".join([text[0], "|" + " --- |" * columns, *text[1:]]) + "\n"
