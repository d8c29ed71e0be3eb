"""Downloads of official files: checked before they are kept, and begun anew if one was interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedge.data.errors import DataError
from fedge.data.files import Remote, check_file


def download(remotes: Sequence[Remote], folder: Path, progress: Any = None) -> list[Path]:
    """Fetch what the folder does not hold yet; returns the files.

    `progress` is an object as pooch wants it: `total`, `update(bytes)`, `reset()` and `close()`. A file appears under
    its name only when it is complete and its checksum is right; one that is there and wrong is replaced.
    """
    return [_one(remote, folder, progress) for remote in remotes]


def _one(remote: Remote, folder: Path, progress: Any) -> Path:
    target, work = folder / remote.name, folder / ".download"
    if _is_good(target, remote.checksum):
        return target
    shutil.rmtree(work, ignore_errors=True)  # what an interrupted download left
    try:
        work.mkdir(parents=True)
        os.replace(_fetch(remote, work, progress), target)
    except OSError as error:  # requests' errors are OSErrors too
        reason = error.strerror or " ".join(str(error).split())
        raise DataError(
            f"cannot download {remote.url}: {reason}; try again, or fetch it another way and use --from"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _fetch(remote: Remote, work: Path, progress: Any) -> str:
    try:
        import pooch
    except ImportError:
        raise DataError("downloads need pooch: pip install 'fedge[download]', or use a local copy") from None
    pooch.get_logger().setLevel("WARNING")
    fetcher = pooch.HTTPDownloader(progressbar=progress if progress is not None else False)
    try:
        return str(pooch.retrieve(remote.url, remote.checksum, remote.name, work, downloader=fetcher))
    except ValueError as error:  # pooch's word for a wrong checksum
        raise DataError(f"{remote.url} did not send the official file: {' '.join(str(error).split())}") from None


def _is_good(path: Path, checksum: str) -> bool:
    try:
        check_file(path, checksum)
    except DataError:
        return False
    return True
