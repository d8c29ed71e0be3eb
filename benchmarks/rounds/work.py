"""A row from its first trial to its last seed, within the time that is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from . import measure
from .choice import chosen, rank
from .grid import Grid, Row, Setting
from .measure import Going, OutOfTime
from .store import Line, Store, key


@dataclass
class Bench:
    """Where, until when, and what is known."""

    grid: Grid
    store: Store
    device: str
    deadline: float  # on the clock of `measure.now`
    jobs: int = 1  # processes that share the device
    say: Callable[[str], None] = print

    def stop(self) -> bool:
        return measure.now() > self.deadline

    def do(self, row: Row, seed: int | None = None) -> None:
        """Tune, then train with every seed, or with the given one; what is stored is not done again."""
        if row.problem.like:
            self.tune(Row(self.grid.problems[row.problem.like], row.method))
        setting = self.chosen(row) if row.problem.like else self.tune(row)
        for one in self.grid.final["seeds"] if seed is None else [seed]:
            self.final(row, setting, one)

    def attempt(self, row: Row, rounds: int = 5) -> None:
        """A few rounds of the first and the last setting, stored nowhere: mistakes and times, before the long work."""
        for setting in (row.method.settings[0], row.method.settings[-1]):
            began = measure.now()
            going = measure.start(row, setting, self.grid, 0)
            measure.advance(going, row, rounds, 0, self.device, self.stop, judge_train=bool(row.problem.train))
            measure.late_accuracy(going)
            took, last = measure.now() - began, going.records[-1]
            told = f"{100 * last['test_accuracy']:.1f} % after {rounds} rounds"
            self.say(f"try {row.name} {setting}: {told}, {took:.1f} s in all, {last['seconds']:.3f} s for the last")

    # -- tuning

    def tune(self, row: Row) -> Setting:
        """Successive halving over the settings; the chosen one.

        A setting that reached the second stage among fewer settings, before the grid was widened, stays in the choice.
        """
        first, second = self.grid.tuning["rounds"]
        going: dict[str, Going] = {}
        trials = [self.trials(row, setting, first, going) for setting in row.method.settings]
        kept = sorted(trials, key=lambda lines: rank(self.grid, lines))[: self.grid.tuning["keep"]]
        for lines in kept:
            self.trials(row, lines[0]["setting"], second, going)
        return self.chosen(row)

    def chosen(self, row: Row) -> Setting:
        """The setting that the stored trials choose."""
        found = chosen(self.grid, row.problem, self.store, row.method.name)
        if found is None:
            raise SystemExit(f"{row.name} has no trials yet, so no setting is chosen: run the row first")
        return found

    def trials(self, row: Row, setting: Setting, rounds: int, going: dict[str, Going]) -> list[Line]:
        return [self.trial(row, setting, rounds, seed, going) for seed in self.grid.tuning["seeds"]]

    def trial(self, row: Row, setting: Setting, rounds: int, seed: int, going: dict[str, Going]) -> Line:
        """A setting on held-out data, from where its earlier stage ended if that is still there."""
        line = self.line("trial", row, setting, rounds, seed)
        if (known := self.store.get(*key(line))) is not None:
            return known
        name = f"{setting}, seed {seed}"
        begun = going.get(name)
        self.in_time(row, rounds - (len(begun.records) if begun else 0))
        began = measure.now()
        if begun is None:
            begun = going[name] = measure.start(row, setting, self.grid, seed, self.grid.tuning["validation"])
        before = len(begun.records)
        measure.advance(begun, row, rounds, seed, self.device, self.stop)
        return self.keep(line, begun, row, before, began)

    # -- results

    def final(self, row: Row, setting: Setting, seed: int) -> Line:
        rounds = row.problem.rounds
        line = self.line("run", row, setting, rounds, seed)
        if (known := self.store.get(*key(line))) is not None:
            return known
        self.in_time(row, rounds)
        began = measure.now()
        going = measure.start(row, setting, self.grid, seed)
        measure.advance(going, row, rounds, seed, self.device, self.stop, judge_train=bool(row.problem.train))
        last = [record["test_accuracy"] for record in going.records[-self.grid.final["last"] :]]
        line |= {"final": mean(last) if last else None, "final_late": measure.late_accuracy(going)}
        return self.keep(line, going, row, 0, began)

    def time(self, row: Row, rounds: int = 14, last: int = 10) -> None:
        """Seconds per round with nothing else on the device: the median of the last rounds, all steps recorded.

        A row that is not tuned yet is timed with its first setting; the size of a step takes no time.
        """
        setting = chosen(self.grid, row.problem, self.store, row.method.name) or row.method.settings[0]
        line = self.line("time", row, setting, rounds, 0)
        if self.store.get(*key(line)) is not None:
            return
        self.in_time(row, rounds)
        going = measure.start(row, setting, self.grid, 0)
        measure.advance(going, row, rounds, 0, self.device, self.stop)
        line["seconds"] = round(median(record["seconds"] for record in going.records[-last:]), 5)
        self.store.add(line | measure.machine(self.device))
        self.say(f"time {row.name}: {line['seconds']:.4f} s per round")

    # -- both

    def line(self, kind: str, row: Row, setting: Setting, rounds: int, seed: int) -> Line:
        names = {"kind": kind, "problem": row.problem.name, "method": row.method.name}
        return {**names, "setting": setting, "rounds": rounds, "seed": seed}

    def keep(self, line: Line, going: Going, row: Row, before: int, began: float) -> Line:
        wall = measure.now() - began
        found = measure.described(going, row, self.grid)
        if line["kind"] == "trial":
            del found["to"]
        took = {"wall": round(wall, 3), "wall_rounds": len(going.records) - before}
        beside = {"jobs": self.jobs} if self.jobs > 1 else {}
        line |= found | took | measure.machine(self.device) | beside
        self.store.add(line)
        last = f"{100 * line['accuracy'][-1]:.1f} %" if line["accuracy"] else "nothing"
        state = ", diverged" if line["diverged"] else ""
        where = f"{line['kind']} {row.name} {line['setting']} seed {line['seed']}"
        self.say(f"{where}: {last} after {len(going.records)} rounds{state}, {wall:.1f} s")
        return line

    def in_time(self, row: Row, rounds: int) -> None:
        """Do not begin what will not be finished."""
        if measure.now() + 0.9 * self.seconds(row, rounds) > self.deadline:
            raise OutOfTime

    def seconds(self, row: Row, rounds: int) -> float:
        """What a run of so many rounds will take: as the stored ones did, or else roughly."""
        lines = [*self.store.of("trial", row.problem.name, row.method.name)]
        lines += self.store.of("run", row.problem.name, row.method.name)
        here = measure.machine(self.device)["device"]
        known = [line for line in lines if line["wall_rounds"] and line["device"] == here]
        known = [line for line in known if line.get("jobs", 1) == self.jobs] or known
        if known:
            rates: list[float] = sorted(line["wall"] / line["wall_rounds"] for line in known)
            return rounds * rates[len(rates) // 2]
        return roughly(self.grid, row, rounds)


def roughly(grid: Grid, row: Row, rounds: int) -> float:
    """Set-up and rounds of a run, from the file's rough costs."""
    round = row.problem.round
    round *= grid.cost["spectral"] if row.method.fixed.get("optimiser") == "spectral" else 1
    round *= grid.cost["fedova"] if row.method.around == "fedova" else 1
    return grid.cost["run"] + rounds * round


def plan(bench: Bench, rows: list[Row]) -> list[tuple[str, int, float]]:
    """(row, runs that are missing, seconds) for each row; the settings of a second stage are not known before."""
    found = []
    first, second = bench.grid.tuning["rounds"]
    for row in rows:
        problem, method = row.problem.name, row.method.name
        trials = bench.store.of("trial", problem, method)
        setting = chosen(bench.grid, row.problem, bench.store, method)
        runs = [line for line in bench.store.of("run", problem, method) if line["setting"] == setting]
        done = {rounds: sum(line["rounds"] == rounds for line in trials) for rounds in (first, second)}
        tuned, seeds = len(bench.grid.tuning["seeds"]), len(bench.grid.final["seeds"])
        work = [(first, tuned * len(row.method.settings) - done[first])]
        work += [(second - first, tuned * bench.grid.tuning["keep"] - done[second])]
        work = [] if row.problem.like else work
        work += [(row.problem.rounds, seeds - len(runs))]
        missing = sum(max(0, runs) for _, runs in work)
        compiling = bench.grid.cost["method"] if not trials and not runs else 0.0
        seconds = sum(max(0, runs) * bench.seconds(row, rounds) for rounds, runs in work)
        found.append((row.name, missing, seconds + compiling if missing else 0.0))
    return found
