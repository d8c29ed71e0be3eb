"""A finished run again, from its folder: to predict, to save the model, to look at the record."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedge.core import Algorithm
from fedge.data import Data
from fedge.evaluate import problem_at
from fedge.experiment.errors import ExperimentError
from fedge.experiment.own import code_of, copies_allowed, marked, unread
from fedge.experiment.parsing import parse
from fedge.experiment.setup import build_algorithms, load_data
from fedge.federation import Federation
from fedge.handle import Handle, parameters
from fedge.inputs import Inputs
from fedge.ledger import Ledger
from fedge.preflight import check_start
from fedge.problem import Problem
from fedge.runs import checkpoint, regular
from fedge.runs.contents import check_content
from fedge.runs.differences import as_plain, first_difference
from fedge.runs.experiments import run_folders
from fedge.runs.folder import BEST, RunFolder, RunFolderError
from fedge.runs.lines import parse as parse_line
from fedge.runs.log import fields
from fedge.runs.run import Run

LARGEST, CLASSES = 1 << 26, 1 << 20  # numbers of an example, and classes: up to here a folder is believed


def load_run(
    folder: Path | str, algorithm: Algorithm[Any] | None = None, *, best: bool = False, run_code: bool = False
) -> Run[Any]:
    """The run in a folder as its last checkpoint has it, or with `best` as its best round left it, on the CPU.

    What an experiment file made is made again from it, without the data. A run that was started from Python needs
    its `algorithm`, with a model of the same kind; the parameters are the trained ones. So does a run whose model or
    algorithm is a part of your own (`mine.py:Net`), unless `run_code` allows the file that the folder names to be run,
    or the folder's copy of it if it has changed since.
    """
    folder = Path(folder)
    last = _checkpoint(folder, "checkpoint.pt")
    content = _checkpoint(folder, BEST) if best else last
    _check_config(folder, content["config"], last["config"], BEST)
    table = _config(folder, last["config"])
    history, rows = RunFolder(folder).recorded(last, "load")
    if algorithm is None:
        algorithm = _algorithm(folder, table, run_code)
    else:
        _check_same(folder, algorithm, content["config"])
    _check_params(folder / (BEST if best else "checkpoint.pt"), algorithm, content["state"])
    about = _about(folder, table)
    rounds, handle, example = content["round"], Handle(algorithm.model, algorithm.loss), _zeros(about)
    return Run(
        algorithm,
        content["state"],
        handle,
        history[:rounds],
        Ledger([row for row in rows if row.round <= rounds]),
        content.get("clients", {}),
        ended="" if best else _ended(folder, rounds),
        example=example,
        problem=_problem(algorithm, handle, example, about),
        classes=tuple(about.get("names") or map(str, about.get("values", ()))),
    )


def _ended(folder: Path, rounds: int) -> str:
    """Why it was enough before all rounds were done, if it was."""
    try:
        summary = parse_line(regular.content(folder / "summary.json"))
    except OSError:
        return ""  # it is not finished
    return str(summary.get("ended", "")) if summary is not None and summary.get("rounds") == rounds else ""


def _problem(algorithm: Algorithm[Any], handle: Handle, example: Inputs, about: dict[str, Any]) -> Problem:
    """What its predictions are; a folder of an earlier version is one of classes."""
    if example is None:
        return Problem()
    return problem_at(algorithm, handle, example, _target(about), about.get("values", ()))


def _target(about: dict[str, Any]) -> Tensor:
    found: Tensor = _bounded(about["target"])
    return found


def _checkpoint(folder: Path, file: str) -> dict[str, Any]:
    if not (folder / "checkpoint.pt").is_file():
        inside = [one.name for one in run_folders(folder)] if folder.is_dir() else []
        remedy = f"it holds the runs {inside}, name one of them" if inside else "name the folder of a run"
        raise RunFolderError(f"there is no run in {folder}: {remedy}")
    if not (folder / file).is_file():
        raise RunFolderError(f'{folder} has no best round: it was not trained with keep = "best" in [train]')
    try:
        content = checkpoint.load(folder / file)
        check_content(content if file != BEST else {"engine": {}, **content})
        return content
    except checkpoint.CheckpointError as error:
        where = "" if str(folder) in str(error) else f"{folder / file}: "
        raise RunFolderError(f"cannot load the run: {where}{error}") from None


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Errors in it are those of a file that is not as it was written."""
    try:
        yield
    except RunFolderError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RunFolderError(
            f"cannot load the run: {path} is missing or damaged ({what}): restore it from a copy"
        ) from error


def _config(folder: Path, written: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the folder, which has to be that of the checkpoint."""
    path = folder / "config.toml"
    with _whole(path):
        table = tomllib.loads(regular.content(path).decode())
    _check_config(folder, table, written, path.name)
    return table


def _check_config(folder: Path, found: Any, written: dict[str, Any], file: str) -> None:
    difference = first_difference(written, {**found, "code": written.get("code")})  # files are checked by `own`
    if difference is not None:
        name, old, new = difference
        raise RunFolderError(
            f"cannot load the run: {folder / file} has {name} = {new!r}, but checkpoint.pt was written with {old!r}: "
            "one of them is of another run"
        )


def _algorithm(folder: Path, config: dict[str, Any], run_code: bool) -> Algorithm[Any]:
    if "model" not in config:
        raise RunFolderError(f"{folder} was started from Python: give its algorithm, load_run(folder, algorithm)")
    with copies_allowed() if run_code else nullcontext():
        table = marked(config, folder)
    needed = code_of({"model": table["model"], "algorithm": table["algorithm"]})
    if needed and not run_code:
        files = ", ".join(one["path"] for one in needed.values())
        raise RunFolderError(
            f"{folder} needs code that is not part of fedge ({files}), and none is run unasked: allow it with "
            "--run-code (in Python load_run(folder, run_code=True)), or give the algorithm, load_run(folder, algorithm)"
        )
    try:
        with nullcontext() if needed else unread():  # data of the user's own are not needed
            experiment = parse(table | {"algorithm": [table["algorithm"]]})
            return build_algorithms(experiment, _stand_in(_about(folder, table), experiment.data))[
                table["algorithm"]["label"]
            ]
    except ExperimentError as error:
        raise RunFolderError(
            f"cannot make the algorithm of {folder} again: {error}; or give it from Python, which runs no file: "
            f"fedge.load_run({str(folder)!r}, algorithm).save('model.pt')"
        ) from error


def _check_same(folder: Path, algorithm: Algorithm[Any], config: dict[str, Any]) -> None:
    if "model" in config:
        return
    given = as_plain({"algorithm": fields(algorithm)})
    difference = first_difference(config["algorithm"], given["algorithm"], "algorithm")
    if difference is not None:
        name, old, new = difference
        raise RunFolderError(f"{folder} was trained with {name} = {old!r}, the algorithm given has {new!r}")


def _check_params(path: Path, algorithm: Algorithm[Any], state: Any) -> None:
    """The parameters are those of the model: one that is missing would be exported untrained."""
    here = algorithm.params(algorithm.init(parameters(algorithm.model)))
    with _whole(path):
        found = algorithm.params(state)
        check_start(here, found, "it is")
        if more := found.keys() - here.keys():
            raise ValueError(f"it is of another model: its state has {sorted(map(str, more))[:5]}")


def _about(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What is known of the clients and their examples; not more of them than were dealt to."""
    path = folder / "clients.json"
    with _whole(path):
        found: dict[str, Any] = json.loads(regular.content(path))
        if type(found["clients"]) is not int or found["clients"] < 1:
            raise ValueError(f"clients is {found['clients']!r}")
        most = config.get("partition", config.get("federation", {})).get("clients")
        if type(most) is int and found["clients"] > most:  # there are fewer if some were dealt no examples
            raise ValueError(f"clients is {found['clients']}, by the configuration there are {most}")
        if (x := _zeros(found)) is not None:
            if not 0 <= int(found["classes"]) <= CLASSES:
                raise ValueError(f"classes is {found['classes']}, it must be from 0 to {CLASSES}")
            _one_example(x, found)
    return found


class _StandIn(Federation):
    """One that is asked for its data and its number of clients alone: a small file may say any number."""

    def __init__(self, data: Data, clients: int) -> None:
        super().__init__(data, [[0]])
        self._clients = clients

    @property
    def clients(self) -> int:
        return self._clients


def _stand_in(about: dict[str, Any], data: dict[str, Any]) -> Federation:
    """Clients and classes as the run had them, with one example of zeros in place of the data.

    A folder of an earlier version does not say what an example looks like: for it the data are loaded.
    """
    x = _zeros(about)
    if x is None:
        found = load_data(data)
        return found if isinstance(found, Federation) else _StandIn(found, about["clients"])
    return _StandIn(_one_example(x, about), about["clients"])


def _one_example(x: Inputs, about: dict[str, Any]) -> Data:
    y = _target(about)
    return Data(x, y, x, y, about["classes"], tuple(about["names"]))


def _zeros(about: dict[str, Any]) -> Inputs:
    if "example" not in about:
        return None
    return _bounded(about["example"])


def _bounded(kind: dict[str, Any]) -> Inputs:
    """One example of zeros, unless a few bytes ask for gigabytes of them."""
    if (numbers := _numbers(kind)) > LARGEST:
        raise ValueError(f"an example has {numbers} numbers, it may have {LARGEST}")
    return _like(kind)


def _numbers(kind: dict[str, Any]) -> int:
    """Of one example, in all of its parts."""
    parts = kind["named"].values() if "named" in kind else kind.get("parts")
    return math.prod(kind["shape"]) if parts is None else sum(map(_numbers, parts))


def _like(kind: dict[str, Any]) -> Inputs:
    """One example of zeros, as the folder says what it looks like."""
    if "named" in kind:
        return {name: _like(one) for name, one in kind["named"].items()}
    if "parts" in kind:
        return tuple(_like(one) for one in kind["parts"])
    return torch.zeros(1, *kind["shape"], dtype=getattr(torch, kind["type"]))
