"""The first screen: does FedOVA help, and what does it cost?"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from benchmarks.rounds import store as yardstick
from fedge.sweep import Entry, Store

from .claim import within
from .claims import claims
from .costs import Costs, shown
from .places import paper
from .runs import Runs
from .tables import Cell, cells, markdown, title


class Pair(NamedTuple):
    """FedOVA beside FedAvg in one cell of Table III."""

    name: str
    ours: Costs
    base: Costs

    @property
    def ahead(self) -> float:
        """Points after the same rounds."""
        return (self.ours.cell.final or 0) - (self.base.cell.final or 0)

    @property
    def ahead_at_bytes(self) -> float:
        """Points at the bytes that FedAvg spends."""
        return (self.ours.equal() or 0) - (self.base.cell.final or 0)


def pairs(runs: Runs, store: Store) -> dict[str, list[Pair]]:
    """By the name of the data set, where both methods were run."""
    found: dict[str, list[Pair]] = {}
    for group in runs["noniid"]:
        rows = cells(group, store)
        for name, base in rows["FedAvg"].items():
            ours = rows["FedOVA"][name]
            if base.final is not None and ours.final is not None:
                data = paper()["datasets"][group[0].dataset]
                found.setdefault(data, []).append(Pair(title(name), Costs(ours, base), Costs(base, base)))
    return found


def bullets(runs: Runs, store: Store) -> list[str]:
    found = pairs(runs, store)
    if not found:
        return ["Nothing was run yet."]
    costs = [_same_rounds(found), _same_bytes(found), _cost(found)]
    return [in_short(found), _better(runs, store), *costs, *_many(runs, store), *_optimiser(runs, store)]


def in_short(found: dict[str, list[Pair]]) -> str:
    """The answer in one sentence."""
    every = [pair for row in found.values() for pair in row]
    rounds, moved = sum(pair.ahead > 0 for pair in every), sum(pair.ahead_at_bytes > 0 for pair in every)
    several = [pair for pair in every if len(pair.ours.cell.values("final_accuracy")) > 1]
    clear = sum(pair.ahead > 0 and not within(pair.ahead, pair.ours.cell, pair.base.cell) for pair in several)
    single = f", {len(every) - len(several)} have one seed" if len(several) < len(every) else ""
    return (
        f"**In short**: where rounds are scarce, FedOVA helps in {rounds} of {len(every)} cells ({clear} of them "
        f"beyond the spread of the seeds{single}); where bytes are scarce, in {moved} of {len(every)}. A cell is a "
        "data set and l, how many of ten labels every client holds."
    )


BETTER = (
    "**Try first** FedAvg with a spectral step at the server ([second order](second-order.md)): it adds no bytes and "
    "no work on the devices, and with two labels per client it reached 88 % on Fashion-MNIST with about a quarter of "
    "FedAvg's bytes."
)


def _better(runs: Runs, store: Store) -> str:
    """What to try first, with its figures on the paper's data where there are some beside both methods."""
    tables = [cells(other, store) for other in runs["noniid"]]
    said = dict[str, list[tuple[Cell, list[float]]]]()
    for group in runs.get("server-step", []):
        for name, step in cells(group, store).get("FedAvg + server step", {}).items():
            beside = [t[label][name].final for label in ("FedOVA", "FedAvg") for t in tables if name in t[label]]
            rivals = [value for value in beside if value is not None]
            if step.final is not None and len(rivals) == 2:
                said.setdefault(paper()["datasets"][step.entry.dataset], []).append((step, rivals))
    return " ".join([BETTER, *(_ends(data, row) for data, row in said.items()), *worse(runs, store)])


def worse(runs: Runs, store: Store) -> list[str]:
    """Where the server step, with the length that suits two labels, ends below the paper's two methods."""
    said = []
    for group in runs["noniid"]:
        name = next(entry.cell for entry in group if entry.cell.endswith("-l5"))
        lines = yardstick.Store(yardstick.RESULTS, yardstick.RESULTS).of("run", name, "FedAvg + server spectral")
        table = cells(group, store)
        beside = [(label, table[label][name].final) for label in ("FedAvg", "FedOVA")]
        above = [f"{label}'s {value:.1f}" for label, value in beside if value is not None]
        if lines and above:
            end = 100 * sum(line["final_late"] for line in lines) / len(lines)
            said.append(f"{end:.1f} % on {paper()['datasets'][group[0].dataset]} ({' and '.join(above)})")
    text = "With five labels per client and the step length of two it ends at"
    return [f"{text} {' and '.join(said)}: tune `server_lr` to the split."] if said else []


def _ends(data: str, row: list[tuple[Cell, list[float]]]) -> str:
    """Where the server step ends on a data set, beside FedOVA and FedAvg."""
    steps = [step for step, _ in row]
    ours, ova, avg = (", ".join(f"{value:.1f}" for value in values) for values in zip(
        *((step.final or 0.0, *rivals) for step, rivals in row), strict=True
    ))  # fmt: skip
    seeds = min(len(step.values("final_accuracy")) for step in steps)
    where = _names([title(step.entry.cell) for step in steps])
    few = "one seed of the step" if seeds == 1 else f"{seeds} seeds of the step"
    return f"On {data} at {where} it ends at {ours} % (FedOVA {ova}; FedAvg {avg}; {few})."


def text(runs: Runs, store: Store) -> str:
    return "\n".join(fill(f"- {line}", 120, subsequent_indent="  ") for line in bullets(runs, store))


def _same_rounds(found: dict[str, list[Pair]]) -> str:
    every = [pair for row in found.values() for pair in row]
    said = []
    for data, row in found.items():
        near = [pair.name for pair in row if within(pair.ahead, pair.ours.cell, pair.base.cell)]
        little = f", of which {_names(near)} within the spread of the seeds" if near else ""
        said.append(f"on {data} by {_points([pair.ahead for pair in row])} points at {_names(_labels(row))}{little}")
    above = sum(pair.ahead > 0 for pair in every)
    start = "**After the same rounds** FedOVA is above a tuned FedAvg"
    return f"{start} in {above} of {len(every)} cells: {'; '.join(said)}."


def _labels(row: Sequence[Pair]) -> list[str]:
    return [pair.name for pair in row]


def _points(values: Sequence[float]) -> str:
    """`0.2, 0.4`."""
    return ", ".join(f"{value:.1f}" for value in values)


def _names(names: Sequence[str]) -> str:
    """`l = 2, 3`."""
    return f"l = {', '.join(name.removeprefix('l = ') for name in names)}"


def _same_bytes(found: dict[str, list[Pair]]) -> str:
    sides = []
    for word, sign in (("ahead", 1), ("behind", -1)):
        rows = {data: [pair for pair in row if pair.ahead_at_bytes * sign > 0] for data, row in found.items()}
        said = [
            f"on {data} at {_names(_labels(row))} by {_points([abs(pair.ahead_at_bytes) for pair in row])} points"
            for data, row in rows.items()
            if row
        ]
        sides += [f"{word} {' and '.join(said)}"] if said else []
    start = "**At the bytes that FedAvg spends** in those rounds FedOVA, stopped earlier, is "
    return f"{start}{'; '.join(sides)}."


def _cost(found: dict[str, list[Pair]]) -> str:
    said = []
    for data, (pair, *_) in found.items():
        goal = goal_of(pair.ours.cell.entry)
        if (ours := pair.ours.bytes_to(goal)) is None or (base := pair.base.bytes_to(goal)) is None:
            continue
        work = [shown(one.gradients_to(goal), places=1) for one in (pair.ours, pair.base)]
        end = f"{ours / 1e9:.1f} GB and {work[0]} million gradients (FedAvg {base / 1e9:.1f} and {work[1]})"
        said.append(f"to {goal:g} % on {data} with {pair.name}, {end}")
    lead = "**A round costs l times FedAvg's**, in bytes and in local work, if clients hold l labels each"
    return f"{lead}: {'; '.join(said)}." if said else f"{lead}."


def goal_of(entry: Entry) -> float:
    """The test accuracy, in %, up to which bytes and work are counted."""
    name = entry.dataset
    iid = entry.config["partition"]["kind"] == "iid"
    return float(paper()["targets"][name]["test"] if iid else paper()["goals"][name])


def _many(runs: Runs, store: Store) -> list[str]:
    """What FedOVA loses with many clients, and what the paper says it does."""
    said = []
    for group in runs["clients"]:
        for claim in claims(group, store):
            if claim.about.startswith("FedOVA loses") and claim.ours:
                cell = title(claim.said.split(": ", 1)[0])
                near = "; the seeds spread by more than the difference to it" if claim.is_near else ""
                data = paper()["datasets"][group[0].dataset]
                said.append(f"{claim.ours} points on {data} ({cell}; the paper {claim.theirs}{near})")
    fell = "One seed fell on Fashion-MNIST; with lr 0.07 none did ([superseded runs](results-superseded.md))."
    return [f"**With many more clients** FedOVA loses {', '.join(said)}. {fell}"] if said else []


def _optimiser(runs: Runs, store: Store) -> list[str]:
    said = []
    for group in runs["optimisers"]:
        found = [claim for claim in claims(group, store) if claim.about.endswith("than FedAvg-SGD")]
        if found:
            told = ", ".join(claim.ours for claim in found)
            said.append(f"on {paper()['datasets'][group[0].dataset]} {told}")
    line = "**The paper's L-BFGS method against FedAvg with SGD**, rounds to a target"
    return [f"{line}: {'; '.join(said)}."] if said else []


def equal_bytes(runs: Runs, store: Store) -> str:
    """The table of the first screen: one row per cell of Table III."""
    rows = []
    for data, row in pairs(runs, store).items():
        for pair in row:
            goal = goal_of(pair.ours.cell.entry)
            moved, work = (
                " / ".join(shown(getattr(one, what)(goal), places=places) for one in (pair.base, pair.ours))
                for what, places in (("bytes_to", 0), ("gradients_to", 1))
            )
            finals = [pair.base.cell.text(), pair.ours.cell.text(), pair.ours.equal_text()]
            rows.append([f"{data}, {pair.name}", *finals, f"{goal:g} %", moved, work])
    head = ["cell", "FedAvg, %", "FedOVA, same rounds, %", "FedOVA, FedAvg's bytes, %"]
    return markdown([*head, "target", "MB to it: FedAvg / FedOVA", "10⁶ gradients to it: FedAvg / FedOVA"], rows)
