"""What was aimed at before the runs, beside what they reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from .findings import F2, IID, K2, ONE, SERVER, TWO, F, Findings, K
from .tables import NEVER, number, table

Value = Callable[[Findings, str], float]  # of a method


@dataclass(frozen=True)
class Aim:
    """Some numbers of one method on one problem; `low`: less is better."""

    what: str
    method: str
    base: str
    limits: tuple[float, ...]
    values: tuple[Value, ...]
    places: int = 0
    low: bool = True


def to(problem: str, goal: str) -> Value:
    return lambda found, method: found.at(problem, method, goal)


def ended(problem: str, which: str = "final") -> Value:
    return lambda found, method: 100 * mean(line[which] for line in found.runs(problem)[method])


def lost(many: str, few: str) -> Value:
    """Points of accuracy that more clients cost: after as many rounds as both have."""

    def points(found: Findings, method: str) -> float:
        runs = [[line["accuracy"] for line in found.runs(problem)[method]] for problem in (few, many)]
        rounds, last = min(len(curve) for curves in runs for curve in curves), found.grid.final["last"]
        less, more = (mean(mean(curve[rounds - last : rounds]) for curve in curves) for curves in runs)
        return float(100 * (less - more))

    return points


def share(problem: str, goal: str) -> Value:
    """MB as a share of the best first-order method's."""
    return lambda found, method: found.at(problem, method, goal, "bytes") / found.cheapest(problem, goal, "bytes")[0]


SGD, OVA = "FedAvg-SGD", "FedOVA"
BOTH, SHRINKING, FOOF = "Spectral + server spectral", "Server spectral, schedule", "FOOF"
F_MB = tuple(share(F, goal) for goal in ("test 0.9", "test 0.91", "train 0.975"))
K_MB = share(K, "test 0.9"), share(K, "train 0.95")
FEW_F, FEW_K = (tuple(ended(f"{data}-l{few}", "final_late") for few in (3, 5)) for data in ("fmnist", "kws"))
AIMS = (
    Aim("Fashion-MNIST, IID: rounds to test 90 / 91 %", IID, SGD, (8, 15), (to(F, "test 0.9"), to(F, "test 0.91"))),
    Aim("the same with the step at clients and server", BOTH, SGD, (8, 15), (to(F, "test 0.9"), to(F, "test 0.91"))),
    Aim("Fashion-MNIST, IID: rounds to train 97.5 %", IID, SGD, (27,), (to(F, "train 0.975"),)),
    Aim("the same with the step at clients and server", BOTH, SGD, (27,), (to(F, "train 0.975"),)),
    Aim("Fashion-MNIST, IID: final test, % (150 rounds)", IID, SGD, (92.0,), (ended(F),), 2, False),
    Aim("the same", SERVER, SGD, (92.0,), (ended(F),), 2, False),
    Aim("the same", FOOF, SGD, (92.0,), (ended(F),), 2, False),
    Aim("KWS, IID: rounds to test 90 %, train 95 %", IID, SGD, (15, 11), (to(K, "test 0.9"), to(K, "train 0.95"))),
    Aim(
        "Fashion-MNIST, two labels: rounds to 85 / 88 %", TWO, OVA, (12, 25), (to(F2, "test 0.85"), to(F2, "test 0.88"))
    ),
    Aim("Fashion-MNIST, two labels: mean of late rounds, %", TWO, OVA, (90.3,), (ended(F2, "final_late"),), 2, False),
    Aim("the same over FedAvg", ONE, "FedAvg", (90.3,), (ended(F2, "final_late"),), 2, False),
    Aim("the same over FedOVA, 200 rounds", TWO, OVA, (90.3,), (ended("fmnist-l2-long", "final_late"),), 2, False),
    Aim(
        "Fashion-MNIST, two labels: points lost with 1,000 clients",
        TWO,
        OVA,
        (0.5,),
        (lost("fmnist-k1000", "fmnist-l2-long"),),
        2,
    ),
    Aim(
        "the same over FedAvg",
        ONE,
        "FedAvg",
        (0.5,),
        (lost("fmnist-k1000", F2),),
        2,
    ),
    Aim("Fashion-MNIST, three / five labels: mean of late rounds, %", TWO, OVA, (91.3, 92.0), FEW_F, 2, False),
    Aim("the same over FedAvg", ONE, "FedAvg", (91.3, 92.0), FEW_F, 2, False),
    Aim("KWS, two labels: rounds to 85 / 90 %", TWO, OVA, (10, 28), (to(K2, "test 0.85"), to(K2, "test 0.9"))),
    Aim("KWS, two labels: mean of late rounds, %", TWO, OVA, (91.8,), (ended(K2, "final_late"),), 2, False),
    Aim("the same over FedAvg", ONE, "FedAvg", (91.8,), (ended(K2, "final_late"),), 2, False),
    Aim("KWS, two labels: points lost with 500 clients", TWO, OVA, (2.2,), (lost("kws-k500", K2),), 2),
    Aim("the same over FedAvg", ONE, "FedAvg", (2.2,), (lost("kws-k500", K2),), 2),
    Aim("KWS, three / five labels: mean of late rounds, %", TWO, OVA, (92.6, 93.0), FEW_K, 2, False),
    Aim("the same over FedAvg", ONE, "FedAvg", (92.6, 93.0), FEW_K, 2, False),
    Aim("Fashion-MNIST, IID: MB to test 90 / 91 / train 97.5 %, share", IID, SGD, (0.5,) * 3, F_MB, 2),
    Aim("the same without carried momentum", "Spectral", SGD, (0.5,) * 3, F_MB, 2),
    Aim("the same with the server step", SERVER, SGD, (0.5,) * 3, F_MB, 2),
    Aim("the same with a server step that shrinks", SHRINKING, SGD, (0.5,) * 3, F_MB, 2),
    Aim("the same with the step at clients and server", BOTH, SGD, (0.5,) * 3, F_MB, 2),
    Aim(
        "KWS, IID: MB to test 90 / train 95 %, share",
        IID,
        SGD,
        (0.5,) * 2,
        K_MB,
        2,
    ),
    Aim("the same with the step at clients and server", BOTH, SGD, (0.5,) * 2, K_MB, 2),
)


def aims(found: Findings) -> str:
    named = {aim.method for aim in AIMS}
    first = fallen(found, lambda problem, name: name in found.first_order(problem))
    ours = fallen(found, lambda _, name: name in named)
    rest = fallen(found, lambda problem, name: name not in named and name not in found.first_order(problem))
    rows = [row(found, aim) for aim in AIMS]
    rows.append(("seeds that diverge", "those of this table", str(first), "0", str(ours), met(ours, 0, True)))
    rows.append(("the same", "others with curvature", str(first), "0", str(rest), met(rest, 0, True)))
    return table(("what", "method", "FedAvg or FedOVA, tuned", "aim", "reached", ""), rows)


def row(found: Findings, aim: Aim) -> tuple[str, ...]:
    values, base = (known(found, name, aim) for name in (aim.method, aim.base))
    verdicts = [met(value, limit, aim.low) for value, limit in zip(values, aim.limits, strict=True)]
    limits = " / ".join(f"{limit:g}" for limit in aim.limits)
    same = " / ".join(dict.fromkeys(verdicts)) if len(set(verdicts)) == 1 else " / ".join(verdicts)
    return aim.what, aim.method, listed(base, aim.places), limits, listed(values, aim.places), same


def known(found: Findings, method: str, aim: Aim) -> list[float | None]:
    """The values; None where the method was not run."""
    return [_value(found, method, one) for one in aim.values]


def _value(found: Findings, method: str, one: Value) -> float | None:
    try:
        return one(found, method)
    except KeyError:
        return None


def met(value: float | None, limit: float, low: bool) -> str:
    if value is None:
        return "not run"
    return "met" if (value <= limit if low else value >= limit) else "missed"


def listed(values: list[float | None], places: int) -> str:
    return " / ".join(_shown(value, places) for value in values)


def _shown(value: float | None, places: int) -> str:
    if value is None or value == NEVER:
        return "-"
    return f"{value:.{places}f}" if places else number(value)


def fallen(found: Findings, counts: Callable[[str, str], bool]) -> int:
    """Seeds that diverged, of the methods that count on a problem."""
    runs = ((problem, name, lines) for problem in found.grid.problems for name, lines in found.runs(problem).items())
    return sum(line["diverged"] for problem, name, lines in runs if counts(problem, name) for line in lines)
