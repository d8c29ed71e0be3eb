"""What `fedge run` is asked to do: which experiment, in which folder, anew or further."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from fedge import toml
from fedge.experiment.errors import ExperimentError
from fedge.experiment.fields import Table
from fedge.experiment.override import override
from fedge.experiment.own import copies_allowed, marked, own_in, unread
from fedge.experiment.parsing import Experiment, brings_clients, federation_of, parse
from fedge.experiment.setup import deal, load_data
from fedge.experiment.sweeps import Sweep, read_sweep
from fedge.federation import Federation
from fedge.runs import regular
from fedge.runs.experiments import EXPERIMENT_FILE, earlier, fresh, holds_runs, is_finished, is_run

ROOT = Path("runs")
LARGEST = 1 << 24  # bytes of an experiment file


@dataclass(frozen=True)
class Plan:
    """An experiment, or a sweep of many, and its folder."""

    sweep: Sweep
    folder: Path
    resume: bool
    run_code: bool = False  # the folder's copies of the user's own files may be run

    @property
    def experiment(self) -> Experiment:
        """The one experiment, where a sweep cannot be used."""
        if self.sweep.swept:
            raise ExperimentError(f"{self.sweep.name} is a sweep of {len(self.sweep.runs())} runs: use fedge run")
        return self.sweep.first


def read(file: Path | None = None) -> Table:
    """The tables of a file, or of the experiment that comes with the library."""
    if file is None:
        return tomllib.loads(resources.files("fedge").joinpath("default.toml").read_text("utf-8"))
    try:
        found = toml.loads(regular.content(file, LARGEST).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ExperimentError(f"there is no file {file}: name an experiment file, or none for the default") from None
    except IsADirectoryError:
        raise ExperimentError(f"{file} is a folder, expected an experiment file such as digits.toml") from None
    except OSError as error:
        raise ExperimentError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        twice = str(error).startswith("Cannot declare ('algorithm',) twice")
        hint = "; write [[algorithm]], in two brackets, for each of several algorithms" if twice else ""
        raise ExperimentError(f"{file} is not TOML: {error}{hint}") from error
    if not any(isinstance(value, dict | list) for value in found.values()):
        raise ExperimentError(
            f"{file} has no tables: an experiment needs [data], [partition], [model], [train] and [[algorithm]]"
        )
    return found


def load(file: Path | str | None = None, settings: Sequence[str] = ()) -> Experiment:
    """An experiment from a file, with settings such as "train.rounds=20" in place of what it says."""
    return parse(*_tables(file, settings))


def load_sweep(file: Path | str | None = None, settings: Sequence[str] = (), stored: bool = False) -> Sweep:
    """All experiments of a file that has lists of values (`seeds`, `{sweep = [...]}`), or the one of another file.

    `stored` says that a folder of runs has it: whoever made the folder may have written the file.
    """
    return read_sweep(*_tables(file, settings, stored))


def own_files(file: Path) -> list[str]:
    """The Python files that an experiment file names; none of them is run."""
    return own_in(marked(read(file), file.parent))


def stored_sweep(folder: Path) -> Sweep:
    """What a folder of runs was made from, to look at: no file of the user's own is run."""
    with unread():
        return load_sweep(folder / EXPERIMENT_FILE, stored=True)


def _tables(file: Path | str | None, settings: Sequence[str], stored: bool = False) -> tuple[Table, str]:
    path = None if file is None else Path(file)
    return _overridden(path, settings, stored), "experiment" if path is None else path.stem


def _overridden(path: Path | None, settings: Sequence[str], stored: bool = False) -> Table:
    """The tables of a file with settings in place; own parts are named from the folder of the file."""
    folder = None if path is None else path.parent
    return override(marked(read(path), folder, stored), settings, folder)


def load_federation(file: Path | None = None, settings: Sequence[str] = ()) -> Federation:
    """Only the federation of an experiment: its tables [data] and [partition]."""
    data, partition = federation_of(_overridden(file, settings))
    return deal(partition, load_data(data))


def may_bring_clients(file: Path | None, settings: Sequence[str] = ()) -> bool:
    """Whether the data are the user's own and no [partition] deals them out: then they come with their clients."""
    return brings_clients(_overridden(file, settings))


def plan(
    file: Path | None = None,
    settings: Sequence[str] = (),
    out: Path | None = None,
    resume: bool = False,
    root: Path = ROOT,
    run_code: bool = False,
) -> Plan:
    """Find experiment and folder, or say why there is nothing to do.

    With `run_code` a run that goes on may run the folder's copy of a file of the user's own that has changed.
    """
    if run_code:
        if not resume or out is None or file is not None:
            raise ExperimentError(
                "--run-code is for the copies in a folder of runs: use it with --resume --out DIR alone"
            )
        with copies_allowed():
            return replace(_further(None, settings, out, root), run_code=True)
    if resume:
        return _further(file, settings, out, root)
    sweep = load_sweep(file, settings)
    if out is None:
        return Plan(sweep, fresh(root, sweep.name), False)
    if holds_runs(out):
        raise ExperimentError(f"{out} already holds a run: add --resume to go on with it, or choose another --out")
    return Plan(sweep, out, False)


def _further(file: Path | None, settings: Sequence[str], out: Path | None, root: Path) -> Plan:
    folder = _newest(load_sweep(file, settings).name, root) if out is None else out
    stored = folder / EXPERIMENT_FILE
    if not (stored.is_file() or (file is not None and holds_runs(folder))):
        raise ExperimentError(_nothing(folder))
    return Plan(load_sweep(file or stored, settings, stored=file is None), folder, True)


def _newest(name: str, root: Path) -> Path:
    """The newest folder of an experiment in which a run is not finished."""
    found = earlier(root, name)
    for folder in found:
        if not _is_done(folder):
            return folder
    if not found:
        raise ExperimentError(f"there is nothing to resume: no experiment {name!r} in {root}/; run it without --resume")
    raise ExperimentError(
        f"there is nothing to resume: {found[0]} is finished; give it more rounds with "
        f"--out {found[0]} --set train.rounds=..., or start anew without --resume"
    )


def _is_done(folder: Path) -> bool:
    try:
        sweep = stored_sweep(folder)
    except ExperimentError:
        return True  # of another version, or damaged: nothing to go on with
    return all(
        is_finished(folder / run.folder, run.experiment.train["rounds"], bool(run.experiment.train["until"]))
        for run in sweep.runs()
    )


def _nothing(folder: Path) -> str:
    if is_run(folder) and (folder.parent / EXPERIMENT_FILE).is_file():
        return f"{folder} is one run of the experiment in {folder.parent}: use --out {folder.parent}"
    return f"there is nothing to resume: {folder} holds no {EXPERIMENT_FILE}; run it without --resume"
