"""Every attack against every defence: what is left of the accuracy of an experiment's algorithms."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from fedge.algorithms import Robust
from fedge.algorithms.asynchronous import Asynchronous
from fedge.algorithms.wrapper import chain
from fedge.attacks.attack import KINDS, Attack
from fedge.attacks.backdoor import success
from fedge.attacks.link import Attacked, attacked
from fedge.checks import nearest
from fedge.core import Algorithm
from fedge.engine import TooFewReplies
from fedge.experiment import Experiment, ExperimentError, Setup
from fedge.experiment.training import basics_of, engine_of
from fedge.experiment.values import Mismatch, complain, convert, made
from fedge.federation import Federation
from fedge.loop import train
from fedge.runs import atomic
from fedge.runs.differences import does_nothing
from fedge.runs.examples import checksum
from fedge.runs.folder import RunFolder
from fedge.runs.lines import parse
from fedge.runs.run import Record

NONE = "none"  # the attack of nobody
MEAN = "mean"
RECOMMENDED = "bounded_mean"
DEFENCES = {  # what is tried by default, with settings for cohorts of some 20 clients
    MEAN: "mean",
    "median": "median",
    "trimmed_mean": "trimmed_mean,share=0.3",
    "krum": "krum,bad=4,keep=8",
    "clipped_mean": "clipped_mean,limit=1.0",
    RECOMMENDED: "bounded_mean",
}
ELSEWHERE = ("device", "checkpoint_every", "chunk", "workers")  # fields that leave the numbers alone
HASHED = {  # fields of `runs.differences.LATER` that the first results have
    *("clip", "inner_decay", "carry_momentum", "products", "quintics", "dampings", "direction"),
    *("until", "way", "sampling", "metrics", "loss", "width"),
}
Line = dict[str, Any]
_KINDS: dict[str, Any] = {  # of the values of a line
    **dict.fromkeys(("algorithm", "kind", "defence", "config"), str),
    **dict.fromkeys(("seed", "rounds", "dropped"), int),
    "share": int | float,
    "final": int | float | None,
    "opened": int | float | None,
}


@dataclass(frozen=True)
class Case:
    """What identifies a run."""

    algorithm: str
    kind: str
    share: float
    defence: str
    seed: int
    config: str  # a checksum of the algorithm and of all that it was run on


def cases(
    experiment: Experiment, kinds: Sequence[str], shares: Sequence[float], defences: Sequence[str]
) -> Iterator[Case]:
    """Every algorithm with every defence: without liars, then under every attack by every share of the clients."""
    for kind in kinds:
        if kind not in KINDS:
            raise ExperimentError(f"kind is {kind!r}{nearest(kind, KINDS)}, it must be one of {', '.join(KINDS)}")
    for share in shares:
        if not 0 < share < 1:
            raise ExperimentError(f"share is {share}, it must be above 0 and below 1: the share of clients that lie")
    seed = experiment.train["seed"]
    for label in experiment.labels:
        config = _checksum(experiment, label)
        for defence in defences:
            defended(None, defence)
            yield Case(label, NONE, 0.0, defence, seed, config)
            yield from (Case(label, kind, share, defence, seed, config) for share in shares for kind in kinds)


def on_data(wanted: Sequence[Case], federation: Federation) -> list[Case]:
    """The same with a checksum of the data too: what a file of the user's loads may change, and the file does not."""
    known = checksum(federation)
    return [replace(case, config=hashlib.sha256(f"{case.config} {known}".encode()).hexdigest()[:12]) for case in wanted]


def _without(table: dict[str, Any]) -> dict[str, Any]:
    """A table, and those inside it, without later fields that do nothing."""
    kept = {name: one for name, one in table.items() if name in HASHED or not does_nothing(name, one)}
    return {name: _without(one) if isinstance(one, dict) else one for name, one in kept.items()}


def _checksum(experiment: Experiment, label: str) -> str:
    """Of what decides the numbers; a field of [train] that is not set does not, so results outlive new fields."""
    config = experiment.config(label)
    given = {name: one for name, one in config["train"].items() if one is not None and name not in ELSEWHERE}
    given["compile"] = bool(config["train"].get("compile"))  # None: as the engine likes
    tables = {name: _without(config[name]) for name in ("data", "model", "algorithm")}
    plain = {**config, **tables, "train": _without(given)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:12]


def defended(algorithm: Algorithm[Any] | None, text: str) -> Algorithm[Any] | None:
    """The algorithm with the rule that a text names, such as `median` or `krum,bad=4,keep=8`."""
    hint = get_type_hints(Robust)["combine"]
    name, *settings = DEFENCES.get(text, text).split(",")
    try:
        table = {"name": name, **tomllib.loads("\n".join(settings))}
        rule = made(convert(table, hint), hint)
    except (Mismatch, tomllib.TOMLDecodeError, ValueError) as error:
        why = complain("defence", {"name": name}, hint) if isinstance(error, Mismatch) and not settings else str(error)
        remedy = "write it as median, or krum,bad=4,keep=8"
        raise ExperimentError(f"defence is {text!r}: {why or 'its settings do not fit'}; {remedy}") from None
    if algorithm is None or name == MEAN:
        return algorithm
    return Robust(algorithm, rule)


def run(case: Case, setup: Setup) -> Line:
    """One training run: the mean accuracy of its last tenth, and of a back door how often it opened."""
    algorithm, link = _prepared(case, setup)
    records: list[Record] = []
    basics = basics_of(setup.train)
    opened = None
    try:
        done = train(algorithm, setup.federation, **basics, link=link, on_round=records.append)
        opened = success(done.predict, setup.federation.data) if setup.federation.data.labelled else None
    except TooFewReplies:  # the model is not finite any more, or no upload is left
        pass
    except ValueError as error:  # what only shows once algorithm and data meet
        raise ExperimentError(f"{case.algorithm}, {case.defence}: {error}") from error
    last = max(1, basics["rounds"] // 10)
    curve = [record["test_accuracy"] for record in records[-last:]]
    whole = len(records) == basics["rounds"]
    return {
        **asdict(case),
        "rounds": len(records),
        "final": sum(curve) / last if whole else None,
        "opened": opened,
        "dropped": sum(len(record["dropped"]) for record in records),
    }


def _prepared(case: Case, setup: Setup) -> tuple[Algorithm[Any], Attacked]:
    """The algorithm of a case, and the link on which clients lie."""
    kind = "free_rider" if case.kind == NONE else case.kind  # of nobody
    try:
        plain = setup.algorithms[case.algorithm]
        algorithm = defended(plain, case.defence)
        assert algorithm is not None
        if algorithm is not plain and plain.privacy() is not None:
            raise ValueError(
                f"Private combines uploads itself, a rule would change nothing: add --defence {MEAN} alone"
            )
        engine = engine_of(setup.train)
        return algorithm, attacked(algorithm, setup.federation, Attack(kind), case.share, case.seed, engine)
    except (ValueError, TypeError) as error:
        raise ExperimentError(f"{case.algorithm}, {case.defence}: {error}") from error


def check(wanted: Sequence[Case], setup: Setup) -> None:
    """Refuse what cannot be run before anything is: every algorithm with every defence, once."""
    for name, one in setup.algorithms.items():
        if any(isinstance(part, Asynchronous) for part in chain(one)):
            raise ExperimentError(
                f"{name}: attacks are simulated round by round, and its server waits for no round's end"
            )
    if setup.edge is not None:
        raise ExperimentError(
            "edge: attacks are simulated round by round, without devices and time: leave out the table [edge]"
        )
    clients = setup.federation.clients
    for share in {case.share for case in wanted if case.kind != NONE}:
        if not round(share * clients):
            raise ExperimentError(f"share is {share}: nobody of {clients} clients lies; the least is {1 / clients:g}")
    for case in {(case.algorithm, case.defence): case for case in wanted}.values():
        _prepared(replace(case, kind=NONE), setup)


def study(wanted: Iterable[Case], setup: Setup, file: Path | None, tell: Callable[[Line], None]) -> list[Line]:
    """All cases; those that the file has are not run again, the others are written to it one by one."""
    wanted = list(wanted)
    check(wanted, setup)
    with nullcontext() if file is None else RunFolder(file.parent).held():
        return _studied(wanted, setup, file, tell)


def _studied(wanted: Sequence[Case], setup: Setup, file: Path | None, tell: Callable[[Line], None]) -> list[Line]:
    if file is not None:
        _append(file, "")  # what cannot be written is said before any run
    known = {} if file is None else read(file)
    if file is not None:
        _mend(file)
    found = []
    for case in wanted:
        line = known.get(case)
        if line is None:
            line = run(case, setup)
            if file is not None:
                _append(file, json.dumps(line) + "\n")
        tell(line)
        found.append(line)
    return found


def _append(file: Path, text: str) -> None:
    try:
        with open(file, "a", opener=atomic.in_place) as out:
            out.write(text)
    except OSError as error:
        raise ExperimentError(f"cannot write {file}: {error.strerror or error}; choose another --out") from error


def _mend(file: Path) -> None:
    """Without the end of a line whose beginning alone was written when the process was killed."""
    raw = file.read_bytes() if file.is_file() else b""
    if not raw.endswith(b"\n") and raw:
        atomic.write_atomically(file, raw[: raw.rfind(b"\n") + 1])


def read(file: Path) -> dict[Case, Line]:
    """The lines of earlier runs; a torn one at the end is left out."""
    whole = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    found = dict[Case, Line]()
    for number, raw in enumerate(whole, 1):
        line = parse(raw)
        if line is None or not all(isinstance(line.get(name), kind) for name, kind in _KINDS.items()):
            raise ExperimentError(f"line {number} of {file} is not that of a run: remove it, or choose another folder")
        found[Case(**{name: line[name] for name in Case.__dataclass_fields__})] = line
    return found
