"""What the stored results say, in numbers and in three sentences."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from textwrap import fill

from .clipped import rounds_to
from .grid import Grid, Method
from .store import Store
from .tables import Runs, middle, percent, runs_of

# The winners: all labels at each client (fewest rounds; fewest bytes), two labels (over FedOVA; over FedAvg).
IID, SERVER, TWO, ONE = "Spectral carried", "Server spectral", "FedOVA + server spectral", "FedAvg + server spectral"
F, K, F2, K2 = "fmnist-iid", "kws-iid", "fmnist-l2", "kws-l2"
STEPS = ("spectral", "spectral_fast", "shampoo", "soap")
ARITHMETIC = 23  # of spectral local steps, as a multiple of plain ones, in the Fashion-MNIST network (a test counts it)
NEWTON = ("giant", "done", "subspace_newton", "fisher_lbfgs", "foof")


def curved(method: Method) -> bool:
    """Whether a method uses curvature."""
    return method.algorithm in NEWTON or any(value in STEPS for value in method.fixed.values())


def rounds(found: float) -> str:
    return "never within 120" if found == float("inf") else f"{found:g}"


@dataclass(frozen=True)
class Findings:
    grid: Grid
    store: Store

    def runs(self, problem: str) -> Runs:
        return runs_of(self.grid, self.grid.problems[problem], self.store)

    def at(self, problem: str, method: str, goal: str, what: str = "rounds") -> float:
        """The median of the seeds: rounds, bytes or seconds to a goal."""
        return middle(self.runs(problem)[method], goal, what)

    def final(self, problem: str, method: str, which: str = "final") -> str:
        return percent([line[which] for line in self.runs(problem)[method]])

    def first_order(self, problem: str) -> list[str]:
        """Methods that were run on it and use no curvature, neither in their steps nor in their algorithm."""
        return [name for name in self.runs(problem) if not curved(self.grid.methods[name])]

    def cheapest(self, problem: str, goal: str, what: str) -> tuple[float, str]:
        """The best first-order method."""
        return min((self.at(problem, name, goal, what), name) for name in self.first_order(problem))

    def rivals(self, problem: str, around: str | None = None) -> list[str]:
        """The first-order methods inside FedOVA, or outside it."""
        return [name for name in self.first_order(problem) if self.grid.methods[name].around == around]

    def best_of(self, problem: str, goal: str, around: str | None = None) -> str:
        """`FedAvgM 80`: the best tuned first-order method and its rounds."""
        found, name = min((self.at(problem, name, goal), name) for name in self.rivals(problem, around))
        return f"{name} {rounds(found)}"

    def highest(self, problem: str, which: str) -> str:
        """The first-order method that ends highest."""
        return max(self.first_order(problem), key=lambda name: self.ended(problem, name, which))

    def ended(self, problem: str, method: str, which: str = "final") -> float:
        """The mean of the seeds, in %; of a run that broke off nothing."""
        return 100 * mean(line[which] or 0.0 for line in self.runs(problem)[method])

    def answer(self) -> str:
        return "\n".join(fill(f"- {line}", 120, subsequent_indent="  ") for line in self.lines())

    def short(self) -> str:
        """The three lines of the README: how many rounds, how many bytes, where not."""
        lines = (self.short_rounds(), self.short_bytes(), self.short_not())
        return "\n".join(fill(f"- {line}", 120, subsequent_indent="  ") for line in lines)

    def short_rounds(self) -> str:
        mine, base = (rounds(self.at(F, name, "test 0.9")) for name in (IID, "FedAvg-SGD"))
        two, plain = (rounds(self.at(F2, name, "test 0.88")) for name in (ONE, "FedAvg"))
        first = self.best_of(F, "test 0.9")
        rival, inside = (self.best_of(F2, "test 0.88", around) for around in (None, "fedova"))
        few, ovas = (len(self.rivals(F2, around)) for around in (None, "fedova"))
        return (
            f"**Rounds** on Fashion-MNIST: {mine} to reach 90 % where clients hold all labels, with spectral local "
            f"steps (FedAvg {base}; the best of {len(self.first_order(F))} tuned first-order methods, {first}); {two} "
            f"to reach 88 % where they hold two, with a spectral step of the server over FedAvg (FedAvg {plain}; the "
            f"best of {few} outside FedOVA, {rival}; the best of {ovas} inside it, {inside}; with clipped gradients, "
            f"tuned elsewhere, FedAvg {rounds_to(F2, 'Clipped FedAvg', 0.88):g})."
        )

    def short_bytes(self) -> str:
        pairs = ((F, SERVER, "test 0.9"), (F2, ONE, "test 0.88"))
        shares = [self.at(p, m, goal, "bytes") / self.cheapest(p, goal, "bytes")[0] for p, m, goal in pairs]
        return (
            f"**Bytes**: the server step adds none, and needs {shares[0]:.2f} and {shares[1]:.2f} of those of the "
            f"cheapest tuned first-order method to these targets ({self.of_clipped():.2f} of those of FedAvg with "
            "clipped gradients to the second); local steps with carried momentum double a round's."
        )

    def of_clipped(self) -> float:
        """Rounds of the server step over those of clipped FedAvg, and so also bytes: a round's are the same."""
        return self.at(F2, ONE, "test 0.88") / rounds_to(F2, "Clipped FedAvg", 0.88)

    def short_not(self) -> str:
        slow, plain = (self.per_round(F, name) for name in (IID, "FedAvg-SGD"))
        times = f" take {slow / plain:.1f} times FedAvg's time on a GPU," if slow and plain else " take"
        ours = [self.ended(F, name) for name in (SERVER, IID)]
        high = self.highest(F, "final")
        gains, over = ([end - self.ended(F, name) for end in ours] for name in ("FedAvg-SGD", high))
        return (
            f"**Where not**: local steps{times} {ARITHMETIC} times its arithmetic, and with two labels per "
            f"client they did harm in a first trial (on digits not with carried momentum). With all labels final "
            f"accuracy on Fashion-MNIST gains {gains[0]:.1f} points over FedAvg with the server step and "
            f"{gains[1]:.1f} with local steps; over {high}, the highest first-order method, {over[0]:+.1f} and "
            f"{over[1]:+.1f}.{self.five()}"
        )

    def lines(self) -> tuple[str, str, str]:
        return self.rounds_line(), self.bytes_line(), self.not_line()

    def per_round(self, problem: str, name: str) -> float | None:
        """Seconds, as `--time` measured them, or else the median of the runs made alone, with any setting."""
        timed: list[float] = [line["seconds"] for line in self.store.of("time", problem, name)]
        alone = [line for line in self.store.of("run", problem, name) if "jobs" not in line]
        timed = timed or [line["spent"]["seconds"] / len(line["accuracy"]) for line in alone]
        return median(timed) if timed else None

    def rounds_line(self) -> str:
        f90, server, base = (self.at(F, name, "test 0.9") for name in (IID, SERVER, "FedAvg-SGD"))
        first, name = self.cheapest(F, "test 0.9", "rounds")
        k90, kws = (rounds(self.at(K, method, "test 0.9")) for method in (IID, "FedAvg-SGD"))
        (avgs, few), (ovas, inside) = (
            (
                " and ".join(self.best_of(problem, "test 0.88", around) for problem in (F2, K2)),
                len(self.rivals(F2, around)),
            )
            for around in (None, "fedova")
        )
        clipped = (rounds_to(F2, "Clipped FedAvg", 0.88), rounds_to(K2, "Clipped FedOVA", 0.88))
        two, ova, one, avg = (
            " and ".join(rounds(self.at(problem, method, "test 0.88")) for problem in (F2, K2))
            for method in (TWO, "FedOVA", ONE, "FedAvg")
        )
        return (
            f"**Rounds.** All labels at every client: spectral local steps reach test 90 % in {f90:g} rounds on "
            f"Fashion-MNIST, a spectral server step in {server:g} (FedAvg {base:g}; {name}, the best of "
            f"{len(self.first_order(F))} tuned first-order methods, {first:g}); on KWS local steps need {k90} "
            f"(FedAvg {kws}; the best of {len(self.first_order(K))}, {self.best_of(K, 'test 0.9')}). Two labels per "
            f"client, to 88 % on Fashion-MNIST and KWS: with a spectral server step FedAvg needs {one} rounds (without "
            f"{avg}; the best of {few} first-order methods outside FedOVA: {avgs}), FedOVA {two} (without {ova}; the "
            f"best of {inside} inside it: {ovas}). Clipped gradients are in none of these grids; tuned elsewhere, "
            f"FedAvg with them needs {clipped[0]:g} on Fashion-MNIST and FedOVA {clipped[1]:g} on KWS."
        )

    def bytes_line(self) -> str:
        best, name = self.cheapest(F, "test 0.9", "bytes")
        carried, server = (self.at(F, method, "test 0.9", "bytes") for method in (IID, SERVER))
        one, two = ([self.at(p, method, "test 0.88", "bytes") for p in (F2, K2)] for method in (ONE, TWO))
        plain = one[0] / self.at(F2, "FedAvg", "test 0.88", "bytes")
        rivals = [self.cheapest(p, "test 0.88", "bytes") for p in (F2, K2)]
        against = [f"{mine / other:.2f} of {name}'s" for mine, (other, name) in zip(one, rivals, strict=True)]
        ends = [" and ".join(self.final(p, method, "final_late") for p in (F2, K2)) for method in (ONE, TWO, "FedOVA")]
        tops = [(self.highest(p, "final_late"), p) for p in (F2, K2)]
        high = " and ".join(f"{self.final(p, name, 'final_late')} ({name})" for name, p in tops)
        return (
            "**Bytes.** A server step adds none, carried momentum doubles a round's. To test 90 % on Fashion-MNIST, "
            f"IID: {server / 1e6:,.0f} MB with the server step, {carried / 1e6:,.0f} MB with carried local steps, "
            f"{best / 1e6:,.0f} MB with {name}, the cheapest first-order method. Two labels per client, to 88 %: "
            f"FedAvg with the server step needs {plain:.2f} of FedAvg's MB on Fashion-MNIST, {against[0]} (the "
            f"cheapest first-order method) and, on KWS, {against[1]}; {one[0] / two[0]:.2f} and "
            f"{one[1] / two[1]:.2f} of those of FedOVA with the same step. It also ends higher: "
            f"{ends[0]} %, FedOVA with the step {ends[1]} %, FedOVA alone {ends[2]} %, the highest first-order methods "
            f"{high} (means of late rounds)."
            f"{self.many()}"
        )

    def many(self) -> str:
        """What many more clients do to FedAvg with the server step, where it was run."""
        if any(ONE not in self.runs(problem) for problem in ("fmnist-k1000", "kws-k500")):
            return ""
        ends = [self.final(problem, ONE, "final_late") for problem in ("fmnist-k1000", "kws-k500")]
        return f" With 1,000 and 500 clients in place of 100 it ends at {ends[0]} and {ends[1]} % (200 rounds)."

    def not_line(self) -> str:
        server, ours, base = (self.final(F, name) for name in (SERVER, IID, "FedAvg-SGD"))
        high = self.highest(F, "final")
        best = "" if high == "FedAvg-SGD" else f", {self.final(F, high)} % {high}, the highest first-order method"
        slow, plain = (self.per_round(F, name) for name in (IID, "FedAvg-SGD"))
        times = f", {slow / plain:.1f} times its round on one H200, in TF32" if slow and plain else ""
        return (
            f"**Where not.** Local spectral steps cost device time ({ARITHMETIC} times FedAvg's arithmetic{times}); "
            "the server step costs the devices nothing. "
            f"Final accuracy gains little on Fashion-MNIST, IID: {server} % with the server step, {ours} % with local "
            f"steps, {base} % FedAvg{best}. With two labels per client local spectral steps did harm in a first trial "
            "(73 to 77 %; one seed, on the test set, not stored); on [digits](curvature.md) they do without carried "
            f"momentum, and with it they do not.{self.five()}"
        )

    def five(self) -> str:
        """The step length of two labels at five, where it was run."""
        runs = self.runs("fmnist-l5").get(ONE, []) if "fmnist-l5" in self.grid.problems else []
        if not runs:
            return ""
        return (
            f" With five labels per client and the step length of two, FedAvg with the server step ends at "
            f"{self.final('fmnist-l5', ONE, 'final_late')} % on Fashion-MNIST, below plain FedAvg "
            "([results](results.md)): tune it."
        )
