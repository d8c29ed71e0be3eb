"""What every number of a table was measured with, and what else was run in its cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from fedge.experiment.fields import Table
from fedge.sweep.entries import Entry, innermost, step_of, with_setting
from fedge.sweep.store import Line, Store

from .places import grid
from .tables import NOT_RUN, NOTHING, Cell, cells, is_good, markdown, spread

SEEN = 0.05  # MB


def details(entries: Sequence[Entry], store: Store) -> str:
    """What every number was measured with."""
    rows = []
    for label, row in cells(entries, store).items():
        for cell in row.values():
            rows.append(_measured(cell, label, setting(cell.entry), cell.good))
            if not cell.lines and cell.superseded:
                step = step_of(cell.superseded[0]["config"]["algorithm"])
                rows.append(_measured(cell, label, f"{step}, before the line above was chosen", cell.earlier))
    return markdown(["cell", "method", "setting", "rounds", "MB per round", "dropped", "s per round", "hardware"], rows)


def _measured(cell: Cell, label: str, setting: str, lines: Sequence[Line]) -> list[str]:
    """What these runs of a cell were measured with."""
    head = [cell.entry.cell, label, setting, str(cell.entry.rounds)]
    if not lines:
        return [*head, NOTHING, NOTHING, NOTHING, NOT_RUN]
    where = "; ".join(dict.fromkeys(map(_machine, lines)))
    return [*head, _moved(lines), _dropped(lines), spread([line["seconds_a_round"] for line in lines], 3), where]


def _moved(lines: Sequence[Line]) -> str:
    """Megabytes per round, both ways; and, if they can be seen, those before the first round."""
    found = [(line["up_bytes"] + line["down_bytes"] - line["setup_bytes"]) / line["rounds"] for line in lines]
    first = mean(line["setup_bytes"] for line in lines) / 1e6
    return spread([one / 1e6 for one in found], 1) + (f", once {first:.1f}" if first >= SEEN else "")


def _dropped(lines: Iterable[Line]) -> str:
    return ", ".join(str(line.get("dropped", 0)) for line in lines)


def _machine(line: Line) -> str:
    compiled = ", compiled" if line["engine"].get("compile") else ""
    return f"{line['hardware']}, {line['engine']['precision']}{compiled}"


def others(entries: Sequence[Entry], store: Store) -> str:
    """The same runs with other settings of the grid, seed by seed; empty if there are none."""
    rows = []
    for cell in _otherwise(entries, store):
        pairs = zip(cell.entries, cell.lines, strict=True)
        seeds = "; ".join(f"{entry.seed}: {_final(line)}" for entry, line in pairs)
        rows.append(
            [cell.entry.cell, cell.entry.label, described(cell.entry.config["algorithm"]), seeds, _dropped(cell.lines)]
        )
    return markdown(["cell", "method", "setting", "test, %, seed by seed", "dropped"], rows) if rows else ""


def better(entries: Sequence[Entry], store: Store) -> list[Entry]:
    """The same entries; with the best other setting that has all seeds, none diverged and a better mean, if any."""
    best = {(name, label): cell for label, row in cells(entries, store).items() for name, cell in row.items()}
    for cell in _otherwise(entries, store):
        place = cell.entry.cell, cell.entry.label
        now = best[place].final
        if now is not None and len(cell.good) == len(best[place].entries) and (cell.final or 0) > now:
            best[place] = cell
    found = {(entry.cell, entry.label, entry.seed): entry for cell in best.values() for entry in cell.entries}
    return [found[entry.cell, entry.label, entry.seed] for entry in entries]


def _otherwise(entries: Sequence[Entry], store: Store) -> list[Cell]:
    """What there is in the same cells with settings that are not used now, one cell per setting."""
    found: dict[tuple[str, str, str], list[Entry]] = {}
    grids = {method: grid(method) for method in {entry.method for entry in entries}}
    for entry in entries:
        for setting in grids[entry.method]:
            other = with_setting(entry, setting)
            if other.key != entry.key and store.find(other.key) is not None:
                found.setdefault((entry.cell, entry.label, str(setting)), []).append(other)
    return [Cell(group, store) for group in found.values()]


def _final(line: Line) -> str:
    value = line.get("final_accuracy")  # a run that failed has none
    final = NOTHING if value is None else f"{100 * value:.1f}"
    return final if is_good(line) else f"{final} (diverged)"


def setting(entry: Entry) -> str:
    """What a run was made with, and how that came to be."""
    note = " (not tuned here)" if entry.rank is None else ""
    note = f" (choice {entry.rank + 1}: with those before it, runs diverged)" if entry.rank else note
    return described(entry.config["algorithm"]) + note


def described(algorithm: Table) -> str:
    """The step size and the like of the innermost algorithm."""
    inner = innermost(algorithm)
    names = (
        "lr",
        "local_lr",
        "lr_decay",
        "server_momentum",
        "server_lr",
        "mu",
        "damping",
        "clip",
        "epochs",
        "batch_size",
    )
    neutral = {"lr_decay": 1, "server_momentum": 0, "server_lr": 1, "clip": None} | (
        {"lr": inner.get("lr")} if "local_lr" in inner else {}
    )
    shown = {name: inner[name] for name in names if name in inner and inner[name] != neutral.get(name, ())}
    said = ", ".join(f"{name} {'all' if value in (None, 'none') else f'{value:g}'}" for name, value in shown.items())
    modes = ", ".join(str(inner[name]) for name in ("source", "curvature", "matrix") if name in inner)
    return said + (f", {modes}" if modes else "")
