"""What can be wrong with an experiment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExperimentError(ValueError):
    """One line that says where in the experiment, what it is, and what it should be."""


@contextmanager
def at(where: str) -> Iterator[None]:
    """Say where in the experiment a check of the library found something wrong."""
    try:
        yield
    except ExperimentError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise ExperimentError(f"{where}: {error}") from error
