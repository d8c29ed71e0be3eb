"""Files and their checksums: all of a file is read and checked before any of it is used."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

from fedge import regular
from fedge.data.errors import DataError

AGAIN = "get the official file again"
PIECE = 1 << 20
MOST, MOST_OF_ALL = 1 << 28, 1 << 33  # bytes, unpacked: of one file, and of all files of an archive


@dataclass(frozen=True)
class Remote:
    """A file at its official address, and the checksum that its publisher or a reference loader states."""

    url: str
    checksum: str  # "md5:..." or "sha256:..."

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


def read(path: Path) -> bytes:
    """The whole content, unzipped if the name ends in .gz; more than any official file has is refused."""
    try:
        with _opened(path) as file, gzip.open(file) if path.suffix == ".gz" else file as unzipped:
            raw = unzipped.read(MOST + 1)
        if len(raw) > MOST:
            raise DataError(f"{path} holds more than {MOST >> 20} MiB, no official file does: {AGAIN}")
        return raw
    except FileNotFoundError:
        raise DataError(f"{path} is missing: {AGAIN}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged ({error}): {AGAIN}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def check(where: Path | str, content: bytes, md5: str) -> None:
    """Refuse what is not, byte for byte, the official content."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"{where} is not the official file: its content has md5 {found}, expected {md5}; {AGAIN}")


def check_file(path: Path, checksum: str) -> None:
    """The same for a large file, read in pieces."""
    kind, wanted = checksum.split(":")
    try:
        with _opened(path) as file:
            found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if found != wanted:
        size = path.stat().st_size
        raise DataError(
            f"{path} ({size} bytes) is truncated or not the official file: {kind} {found}, expected {wanted}"
        )


def members(
    archive: Path, wanted: Collection[str] | None = None, most: int = MOST, total: int = MOST_OF_ALL
) -> Iterator[tuple[str, bytes]]:
    """(name without a leading ./, content) of the plain files in a tar archive; nothing is unpacked to disk.

    No file may have more than `most` bytes, and all of them together no more than `total`: a few kilobytes can be
    unpacked to gigabytes. No name comes twice.
    """
    seen: set[str] = set()
    try:
        with _unpacked(archive) as file, tarfile.open(fileobj=_Sparing(file, most), mode="r:") as tar:  # type: ignore[call-overload]
            for member in tar:
                if tar.offset > total:
                    raise DataError(f"{archive} holds more than {total >> 20} MiB: {AGAIN}")
                name = member.name.removeprefix("./")
                if member.isfile() and name not in seen and (wanted is None or name in wanted):
                    seen.add(name)
                    yield name, _content(tar, member, f"{archive}: {name}", most)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{archive} is truncated or damaged ({error}): {AGAIN}") from None
    except OSError as error:
        raise DataError(f"cannot read {archive}: {error.strerror or error}") from error


def _opened(path: Path) -> BufferedReader:
    return open(path, "rb", opener=regular.handle)


@contextmanager
def _unpacked(archive: Path) -> Iterator[gzip.GzipFile | IO[bytes]]:
    with _opened(archive) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with gzip.open(file) if zipped else file as unzipped:
            yield unzipped


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str, most: int) -> bytes:
    if member.size > most:
        raise DataError(f"{where} has more than {most >> 20} MiB: {AGAIN}")
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


class _Sparing:
    """A file that hands out no piece beyond a size: a tar header may ask for any."""

    def __init__(self, file: gzip.GzipFile | IO[bytes], most: int) -> None:
        self.file, self.most = file, most
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.most:
            raise tarfile.ReadError(f"a header of it asks for {size} bytes")
        return self.file.read(size)
