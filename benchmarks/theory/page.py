"""The numbers of docs/theory.md: marked blocks, written from the stored results and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .store import load

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def exact(result: dict[str, Any]) -> str:
    optimum = result["optimum"]
    rows = [
        (run["partition"], f"{run['rate']:.3f}", run["rounds_to_1e-8"], f"{run['smallest']:.0e}")
        for run in result["exact"]
    ]
    sure = f"f* = {optimum['value']:.12f} (SciPy, gradient norm {optimum['gradient_norm']:.0e}, so off by at most "
    sure += f"{optimum['error_bound']:.0e})."
    return sure + "\n\n" + table(("partition", "factor per round", "rounds to 1e-8", "smallest gap"), rows)


def noise(result: dict[str, Any]) -> str:
    rows = [
        (
            run["partition"],
            f"{run['lr']:g}",
            run["batches"] or "all",
            f"{run['cohort']} of 100",
            f"{run['early_rate']:.3f}",
            f"{run['late_rate']:.3f}",
            run["settled"],
            f"{run['plateau']:.4f}",
        )
        for run in result["noise"]
    ]
    head = ("partition", "step", "batches of 5", "cohort", "factor, rounds 0-20", "factor, then")
    return table((*head, "rounds to twice the neighbourhood", "neighbourhood"), rows)


def race(result: dict[str, Any]) -> str:
    run = result["race"]
    rows = [
        (f"gradient descent, best step {run['step']:.3f}", run["gradient_descent"]),
        ("FisherLBFGS, product, Gauss-Newton, step 1", run["fisher_lbfgs"]),
        ("ratio", f"{run['ratio']:.1f}"),
    ]
    return table(("one client, full batches", "rounds to f - f* < 1e-6"), rows)


def forms(result: dict[str, Any]) -> str:
    rows = [
        (run["form"], run["rounds_to_1e-6"] or "not in 200", f"{run['largest']:.3g}", f"{max(run['last'], 0):.0e}")
        for run in result["forms"]
    ]
    return table(("form (step 1, damping 0 unless stated)", "rounds to 1e-6", "largest gap", "gap at the end"), rows)


def nonconvex(result: dict[str, Any]) -> str:
    names = ("first", "highest", "running_mean", "neighbourhood")
    rows = [(run["partition"], f"{run['step']:g}", *(f"{run[name]:.4f}" for name in names)) for run in result["runs"]]
    head = ("partition", "step", "at w_0", "highest running mean", "running mean after 1000", "mean of the last 250")
    return table(head, rows)


def constants(result: dict[str, Any]) -> str:
    low, high = result["at_optimum"]
    known = [
        ("λ", "strong convexity: the penalty; reached (softmax does not see a shift of all logits)", result["strong"]),
        ("Λ", "smoothness: no curvature at any w is above it", result["smooth"]),
        ("", f"curvature at w*: {low:.3g} to {high:.3g}", ""),
        ("N", "2 E\\|∇f_i(w*)\\|²", result["N"]),
        ("f(w_0) - f*", "where the runs begin", result["start_gap"]),
    ]
    first = table(("constant", "what", "value"), [(a, b, f"{c:.4g}" if c != "" else "") for a, b, c in known])
    rows = [
        (
            run["run"],
            run["partition"],
            f"{run['theta'][0]:.2g}, {run['theta'][1]:.3g}",
            f"{run['largest_step']:.1e}",
            f"{run['rounds_to_half']:.0e}",
            f"{run['neighbourhood']:.3g}",
        )
        for run in result["runs"]
    ]
    head = ("run", "partition", "θ₁, θ₂", "largest step allowed", "rounds to halve the gap, at best")
    return first + "\n\n" + table((*head, "neighbourhood of the bound"), rows)


def newton(result: dict[str, Any]) -> str:
    rows = []
    for run in result["runs"]:
        names = {"iterations": "{} iterations", "alpha": "alpha {:g}"}
        said = ", ".join(form.format(run[name]) for name, form in names.items() if name in run)
        lengths = ", length chosen by the clients" if run["candidates"] else ", length 1"
        never = f"not in {run['rounds']}"
        counts = [run[f"rounds_to_{level}"] for level in ("0.001", "1e-06")]
        at = [never if count is None else count for count in counts]
        rows.append((run["algorithm"], run["clients"], said + lengths, *at, f"{max(run['last'], 0):.0e}"))
    return table(("algorithm", "clients", "setting", "rounds to 1e-3", "rounds to 1e-6", "gap at the end"), rows)


def moved(result: dict[str, Any]) -> str:
    config = result["config"]
    names = ("ledger", "star_total", "tree_total", "star_path", "star_path_broadcast", "tree_path", "tree_hops")
    rows = [
        (row["algorithm"], f"{row['tau']:,}", *(f"{row[name]:,}" for name in names))
        for row in sorted(result["rows"], key=lambda row: row["tau"])
    ]
    head = ("algorithm", "τ", "ledger", "star, total", "tree, total", "star, path", "star, path with broadcast")
    note = f"Bytes per round, d = {config['parameters']} float32, m = {config['memory']}. "
    note += f"The (2m+1)² dot products would be {config['dot_products']:,} bytes more if clients computed them."
    return note + "\n\n" + table((*head, "tree, path", "hops"), rows)


def made_with(result: dict[str, Any]) -> str:
    return "Made with " + ", ".join(f"{name} {value}" for name, value in result["versions"].items()) + "."


BLOCKS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # block -> stored result, what it says
    "exact": ("convex", exact),
    "noise": ("convex", noise),
    "race": ("convex", race),
    "forms": ("convex", forms),
    "constants": ("constants", constants),
    "newton": ("newton", newton),
    "nonconvex": ("nonconvex", nonconvex),
    "bytes": ("bytes", moved),
    "versions": ("convex", made_with),
}


def filled(text: str) -> str:
    """The page with every block as the stored results have it."""
    for name, (stored, say) in BLOCKS.items():
        begin, end = f"<!-- {name}: generated -->\n", "<!-- end -->"
        if text.count(begin) != 1:
            raise ValueError(f"{PAGE.name} has {text.count(begin)} blocks '{name}', it needs one")
        before, after = text.split(begin)
        text = before + begin + say(load(stored)) + "\n" + after[after.index(end) :]
    return text


def write() -> None:
    PAGE.write_text(filled(PAGE.read_text()))
