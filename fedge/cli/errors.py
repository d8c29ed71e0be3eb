"""Errors as a person sees them: one line, an exit code, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fedge.algorithms.accounting import MissingAccountant
from fedge.cli.text import printable
from fedge.data import DataError
from fedge.engine.clients.recall import WrongMemory
from fedge.engine.clients.run_task import StepError
from fedge.engine.clients.worker import ClientError
from fedge.engine.ranks.process_group import Group, RankError
from fedge.engine.uploads.checks import TooFewReplies
from fedge.engine.ways import NotStackable
from fedge.experiment import ExperimentError
from fedge.report import MissingExtra, ReportError
from fedge.runs.export import ExportError, MissingFormat
from fedge.runs.folder import RunFolderError
from fedge.sweep.processes import LostWorker

ASKED = 2  # what was asked for is not possible
FAILED = 1  # it was possible, and went wrong
INTERRUPTED = 130  # as shells count Ctrl-C


@contextmanager
def one_line(group: Group | None = None) -> Iterator[None]:
    """Turn the errors that a person can do something about into one line, of several processes said by one."""
    try:
        yield
    except (DataError, ExperimentError, RunFolderError, ReportError, ExportError) as error:
        raise fail(str(error), ASKED, group) from None
    except (
        MissingExtra,
        MissingFormat,
        MissingAccountant,
        TooFewReplies,
        ClientError,
        StepError,
        WrongMemory,
        NotStackable,
        RankError,
        LostWorker,
        MemoryError,
    ) as error:
        raise fail(told(error), FAILED, group) from None
    except OSError as error:
        raise fail(str(error), ASKED, group) from None


def told(error: Exception) -> str:
    """Its words; Python's own error of memory has none."""
    return str(error) or "out of memory: free some, or give it smaller files, models or cohorts"


def fail(message: str, code: int, group: Group | None = None) -> typer.Exit:
    """Say it on stderr; raise what comes back."""
    if group is None or group.speaks():
        typer.secho("Error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(" ".join(printable(message).split()), err=True)
    return typer.Exit(code)
