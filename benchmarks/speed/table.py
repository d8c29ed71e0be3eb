"""The one table of docs/speed.md, from all stored figures: `python -m benchmarks.speed.table`.

A file that `benchmarks.speed.gpu --out benchmarks/speed/h200` leaves there becomes a row, in place of an older one of
the same workload and precision; a line of its plan that has no file is a row that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from benchmarks import graphs, newcomers, processors
from benchmarks.readme import replaced
from fedge.bench import WORKLOADS

from .gpu import PLAN, Line
from .page import GPU, HERE, markdown

PAGE = HERE.parents[1] / "docs" / "speed.md"
COMMAND = "python -m benchmarks.speed.table"
HEADER = ["on", "workload", "how", "ms per round", "compared with", "its ms", "times faster (each turn)", "around the work", "first round, s", "file", "command"]  # fmt: skip # noqa: E501
SPLIT = 0.25  # a split that adds up to so much more or less than a round, as with a first call in it, is not shown
ONE, TWO, H200 = "CPU, one thread", "CPU, two cores", "H200"


class Row(NamedTuple):
    """One measurement; `theirs` has one figure per turn, or the only one that is known."""

    on: str
    workload: str
    how: str
    ours: list[float]
    peer: str
    theirs: list[float]
    file: str
    command: str
    around: float | None = None
    first: float | None = None
    title: str | None = None

    @property
    def ratio(self) -> float | None:
        """The median of the turns' ratios, in which the machine was in one state; of one figure, by our median."""
        if not self.theirs or not self.ours:
            return None
        return median(self.turns) if len(self.theirs) > 1 else self.theirs[0] / median(self.ours)

    @property
    def turns(self) -> list[float]:
        return sorted(theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=False))

    def cells(self) -> list[str]:
        title = self.title or f"{self.workload}: {WORKLOADS[self.workload].title}"
        ours, theirs = (number(1e3 * median(one)) if one else "" for one in (self.ours, self.theirs))
        around = "" if self.around is None else f"{self.around:.0%}"
        first = "" if self.first is None else f"{self.first:.1f}"
        known = [ours or "not measured", self.peer if self.theirs else "", theirs, self._faster(), around, first]
        return [self.on, title, self.how, *known, f"`{self.file}`" if self.ours else "", f"`{self.command}`"]

    def _faster(self) -> str:
        if self.ratio is None:
            return ""
        turns = f" ({short(self.turns[0])} to {short(self.turns[-1])})"
        return short(self.ratio) + (turns if len(self.theirs) > 1 else "")


def number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def stored(name: str) -> dict[str, Any]:
    path = HERE / name
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {"timings": []}
    return found


def of(one: dict[str, Any], on: str, how: str, file: str, command: str) -> Row:
    """The row of one timing of `fedge bench`."""
    loop = one.get("peer", "plain loop")
    split = [tuple(share) for share in one.get("split") or []]
    whole = sum(gpu or 0 for _, _, gpu, _ in split)
    is_one_round = whole and abs(whole / 1e3 / median(one["seconds"]) - 1) < SPLIT
    around = sum(gpu for _, _, gpu, clients in split if not clients) / whole if is_one_round else None
    return Row(on, one["workload"], how, one["seconds"], loop, one["plain"], file, command, around, one["first"])


def chains() -> Iterator[Row]:
    for name in ("cpu.json", "cpu_more.json"):
        for one in stored(name)["timings"]:
            yield of(one, TWO, one.get("way") or "", f"speed/{name}", f"fedge bench {one['workload']} --device cpu")


def jax() -> Iterator[Row]:
    found = stored("jax.json")
    for one in found["timings"]:
        peer = f"JAX {found['versions']['jax']} (vmap, scan, jit), CPU time"
        command = f"OMP_NUM_THREADS=1 python -m benchmarks.speed.peers --jax PYTHON {one['workload']}"
        yield Row(ONE, one["workload"], "compiled", one["seconds"], peer, one["jax"], "speed/jax.json", command)


def nets() -> Iterator[Row]:
    for processor, own in processors.stored(graphs.FIGURES).items():
        timings, on = own["timings"], f"{ONE}, {processors.in_short(processor)}"
        for name in (name for name in graphs.NAMES if name in timings):
            command = f"OMP_NUM_THREADS=1 python -m benchmarks.graphs {name}"
            yield of(timings[name], on, timings[name]["way"], "graphs.json", command)


def brought() -> Iterator[Row]:
    """Models as newcomers bring them."""
    command = "OMP_NUM_THREADS=1 python -m benchmarks.newcomers"
    every = [
        (processor, one)
        for processor, own in processors.stored(newcomers.FIGURES).items()
        for one in own["timings"].values()
    ]
    for processor, one in every:
        on, name = f"{ONE}, {processors.in_short(processor)}", one["workload"].rsplit(", ", 1)[0]
        where = ("newcomers.json", f"{command} '{name}'" if " " in name else f"{command} {name}")
        times = (one["seconds"], "plain loop, CPU time", one["plain"])
        yield Row(on, one["workload"], one["way"], *times, *where, first=one["first"], title=one["title"])


def on_a_gpu() -> Iterator[Row]:
    """The plan's lines, and of the older files what none of them repeats."""
    done = set()
    for line in PLAN:
        done.add((line.workload, line.precision, line.compile))
        yield planned(line)
    for name in GPU:
        found = stored(name)
        for one in found["timings"]:
            flags = (f" --precision {found['precision']}" * (found["precision"] != "fp32")) + " --compile" * found[
                "compile"
            ]
            if (one["workload"], found["precision"], found["compile"]) not in done or one["plain"]:
                how = found["precision"] + ", compiled" * found["compile"]
                yield of(one, H200, how, f"speed/{name}", f"fedge bench {one['workload']} --device cuda{flags}")


def planned(line: Line) -> Row:
    file, how = f"h200/{line.name}.json", line.precision + ", compiled" * line.compile
    command = f"python -m benchmarks.speed.gpu {line.name} --out DIR"
    found = stored(file)["timings"]
    return of(found[0], H200, how, f"speed/{file}", command) if found else Row(H200, line.workload, how, [], "", [], "", command)  # fmt: skip # noqa: E501


def pfl() -> Iterator[Row]:
    """The fastest D of each precision against pfl-research."""
    theirs, every = stored("pfl.json"), [row for row in on_a_gpu() if row.workload == "D" and row.ours]
    for precision, seconds in theirs["seconds"].items():
        mine = [row for row in every if row.how.startswith(precision)]
        best = min(mine, key=lambda row: median(row.ours))
        peer = f"pfl-research {theirs['versions']['pfl']}, not in turns (`speed/pfl.json`)"
        yield best._replace(peer=peer, theirs=[seconds])


def rows() -> list[Row]:
    return [*chains(), *jax(), *nets(), *brought(), *on_a_gpu(), *pfl()]


def table() -> str:
    every = rows()
    lost = [
        f"{row.workload} on {row.on} against {row.peer} ({short(row.ratio)})" for row in every if (row.ratio or 9) < 1
    ]
    slower = f"\nRows where fedge is slower: {'; '.join(lost) or 'none'}.\n"
    return markdown(HEADER, [row.cells() for row in every]) + slower


def page() -> str:
    return replaced(PAGE.read_text("utf-8"), "speed", table(), COMMAND, PAGE.name)


def write() -> None:
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    write()
