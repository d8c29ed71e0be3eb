"""What every number of a table was measured with, and what else was run in its cells."""

from __future__ import annotations

from collections.abc import Sequence

from fedge.experiment.fields import Table
from fedge.reproduce.jobs import Job, innermost
from fedge.reproduce.store import Line, Store
from fedge.reproduce.tables import NOT_RUN, NOTHING, Cell, cells, is_good, markdown, spread, step_of


def details(jobs: Sequence[Job], store: Store) -> str:
    """What every number was measured with."""
    rows = []
    for label, row in cells(jobs, store).items():
        for cell in row.values():
            rows.append(_measured(cell, label, setting(cell.job), cell.good))
            if not cell.lines and cell.gave_way:
                step = step_of(cell.gave_way[0]["config"]["algorithm"])
                rows.append(_measured(cell, label, f"{step}, before the line above was chosen", cell.earlier))
    return markdown(["cell", "method", "setting", "rounds", "MB a round", "dropped", "s a round", "hardware"], rows)


def _measured(cell: Cell, label: str, setting: str, lines: Sequence[Line]) -> list[str]:
    """What these runs of a cell were measured with."""
    head = [cell.job.cell, label, setting, str(cell.job.rounds)]
    if not lines:
        return [*head, NOTHING, NOTHING, NOTHING, NOT_RUN]
    lost = ", ".join(str(line.get("dropped", 0)) for line in lines)
    where = "; ".join(dict.fromkeys(f"{line['hardware']}, {line['engine']['precision']}" for line in lines))
    return [*head, _moved(lines), lost, spread([line["seconds_a_round"] for line in lines], 3), where]


def _moved(lines: Sequence[Line]) -> str:
    """Megabytes a round, both ways."""
    found = [(line["up_bytes"] + line["down_bytes"] - line["setup_bytes"]) / line["rounds"] for line in lines]
    return spread([one / 1e6 for one in found], 1)


def others(jobs: Sequence[Job], store: Store) -> str:
    """What was run in the same cells with settings that are not used now, seed by seed; empty if there is nothing."""
    used = {job.key for job in jobs}
    places = {(job.experiment, job.cell, job.label) for job in jobs}
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in store.lines:
        if line["key"] not in used and (line["experiment"], line["cell"], line["label"]) in places:
            name = line["cell"], line["label"], described(line["config"]["algorithm"])
            found.setdefault(name, []).append(line)
    rows = []
    for name, lines in sorted(found.items()):
        lines.sort(key=lambda line: line["seed"])
        rows.append([*name, ", ".join(map(_final, lines)), ", ".join(str(line.get("dropped", 0)) for line in lines)])
    return markdown(["cell", "method", "setting", "test, %, seed by seed", "dropped"], rows) if rows else ""


def _final(line: Line) -> str:
    final = NOTHING if line["final_accuracy"] is None else f"{100 * line['final_accuracy']:.1f}"
    return final if is_good(line) else f"{final} (diverged)"


def setting(job: Job) -> str:
    """What a run was made with, and how that came to be."""
    note = " (not tuned)" if job.rank is None else ""
    note = f" (choice {job.rank + 1}: with those before it, runs diverged)" if job.rank else note
    return described(job.config["algorithm"]) + note


def described(algorithm: Table) -> str:
    """The step size and the like of the innermost algorithm."""
    inner = innermost(algorithm)
    names = ("lr", "local_lr", "lr_decay", "server_momentum", "mu", "damping", "clip", "epochs", "batch_size")
    neutral = {"lr_decay": 1, "server_momentum": 0, "clip": None} | (
        {"lr": inner.get("lr")} if "local_lr" in inner else {}
    )
    shown = {name: inner[name] for name in names if name in inner and inner[name] != neutral.get(name, ())}
    said = ", ".join(f"{name} {'all' if value in (None, 'none') else f'{value:g}'}" for name, value in shown.items())
    modes = ", ".join(str(inner[name]) for name in ("source", "curvature", "matrix") if name in inner)
    return said + (f", {modes}" if modes else "")
