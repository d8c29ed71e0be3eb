"""CIFAR-10: 60,000 colour images, 32x32, in ten classes.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html
(no licence is stated; its authors ask for this citation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge.data.base import Data
from fedge.data.errors import DataError
from fedge.data.files import AGAIN, Remote, check, members, read
from fedge.data.pickles import load_arrays
from fedge.data.places import locate

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32
BATCH, ALL = 1 << 25, 1 << 28  # bytes: more than one batch has, and than the whole archive

BINARY = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
PICKLED = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
REMOTES = (Remote(f"{ADDRESS}cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),)
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FOLDERS = ("", "cifar-10-batches-bin/", "cifar-10-batches-py/")
MARKERS = tuple(f"{sub}{name}" for sub in FOLDERS for name in (*BINARY, *PICKLED)) + ARCHIVES

Rows = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [N, 3072], labels [N]


def find(path: Path | str | None = None) -> Path:
    """The archive, or the folder of the six batches, binary or pickled."""
    found = locate("cifar10", path, MARKERS)
    return found if found.name in ARCHIVES else found.parent


def files(place: Path) -> list[Path]:
    """The archive, or the six batches."""
    if place.is_file():
        return [place]
    names = BINARY if any((place / name).is_file() for name in BINARY) else PICKLED
    return [place / name for name in names]


def load_cifar10(path: Path | str | None = None) -> Data:
    """50,000 train and 10,000 test images [3, 32, 32] in [0, 1]."""
    return parse(find(path), BINARY, PICKLED)


def parse(place: Path, binary: Mapping[str, str], pickled: Mapping[str, str]) -> Data:
    """The data of an archive or folder whose batches have these checksums."""
    is_binary = "binary" in place.name if place.is_file() else any((place / name).is_file() for name in binary)
    checksums, rows = (binary, parse_rows) if is_binary else (pickled, parse_pickle)
    contents = _from_archive(place, checksums) if place.is_file() else _from_folder(place, checksums)
    batches = [_batch(place / name, content, checksums[name], rows) for name, content in contents]
    *train, test = batches
    train_x, train_y = (np.concatenate([batch[part] for batch in train]) for part in (0, 1))
    return Data(_images(train_x), _labels(train_y), _images(test[0]), _labels(test[1]), len(NAMES), NAMES)


def _batch(where: Path, content: bytes, md5: str, rows: Callable[[object, bytes], Rows]) -> Rows:
    check(where, content, md5)  # first: a pickle is not even opened before it is known to be the official one
    return rows(where, content)


def _from_folder(folder: Path, names: Iterable[str]) -> list[tuple[str, bytes]]:
    return [(name, read(folder / name)) for name in names]


def _from_archive(archive: Path, names: Iterable[str]) -> list[tuple[str, bytes]]:
    names = list(names)
    wanted = {f"{folder}{name}" for folder in FOLDERS for name in names}
    found = {Path(name).name: content for name, content in members(archive, wanted, BATCH, ALL)}
    for name in names:
        if name not in found:
            raise DataError(f"{archive} has no {name}: {AGAIN}")
    return [(name, found[name]) for name in names]


def parse_rows(where: object, content: bytes) -> Rows:
    """The binary form: a label and 3,072 pixels an image, channel by channel."""
    width = 1 + PIXELS
    if not content or len(content) % width:
        raise DataError(f"{where} has {len(content)} bytes, no whole number of rows of {width}: {AGAIN}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    return rows[:, 1:], rows[:, 0]


def parse_pickle(where: object, content: bytes) -> Rows:
    """The form for Python: a dict with b"data" and b"labels"."""
    found = load_arrays(where, content)
    try:
        pixels, labels = np.asarray(found[b"data"]), np.asarray(found[b"labels"], dtype=np.uint8)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where} is no batch of CIFAR-10: {error!r}") from None
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS):
        raise DataError(f"{where} has pixels {pixels.dtype} {pixels.shape} for {len(labels)} labels: {AGAIN}")
    return pixels, labels


def _images(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / 255).reshape(-1, 3, 32, 32)


def _labels(labels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
