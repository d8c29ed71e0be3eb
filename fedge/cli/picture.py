"""A picture to a file that the user named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedge.experiment import ExperimentError


def save_picture(figure: Any, out: Path) -> None:
    try:
        figure.savefig(out, dpi=200)
    except ValueError as error:  # matplotlib's word for an ending that it cannot write
        raise ExperimentError(f"cannot write {out}: {error}") from error
    except OSError as error:
        raise ExperimentError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
