"""Fashion-MNIST: 70,000 images of clothes, 28x28, in ten classes.

H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
2017, https://github.com/zalandoresearch/fashion-mnist (MIT licence).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge.data.base import Data
from fedge.data.errors import DataError
from fedge.data.files import AGAIN, Remote, check, read
from fedge.data.idx import parse_idx
from fedge.data.places import locate

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
DEBIAN = "/usr/share/datasets/fashion-mnist"  # the package dataset-fashion-mnist
NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

# Of the unzipped content, because Debian zips it anew.
CONTENT = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
REMOTES = (
    Remote(f"{ADDRESS}train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    Remote(f"{ADDRESS}train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
    Remote(f"{ADDRESS}t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
    Remote(f"{ADDRESS}t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
)
MARKERS = tuple(f"{name}{ending}" for name in CONTENT for ending in ("", ".gz"))


def find(path: Path | str | None = None) -> Path:
    """The folder with the four idx files, zipped or not; Debian's, if ours is incomplete."""
    folder = locate("fashion_mnist", path, MARKERS, (DEBIAN,)).parent
    return Path(DEBIAN) if path is None and not _is_complete(folder) and _is_complete(Path(DEBIAN)) else folder


def _is_complete(folder: Path) -> bool:
    return all(any((folder / f"{name}{ending}").is_file() for ending in ("", ".gz")) for name in CONTENT)


def files(folder: Path) -> list[Path]:
    """The four files as they are there, zipped or not."""
    found = []
    for name in CONTENT:
        there = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
        if not there:
            raise DataError(f"{folder} has no {name} or {name}.gz: {AGAIN}")
        found.append(there[0])
    return found


def load_fashion_mnist(path: Path | str | None = None) -> Data:
    """60,000 train and 10,000 test images [1, 28, 28] in [0, 1]."""
    return parse(files(find(path)), CONTENT)


def parse(paths: list[Path], content: Mapping[str, str]) -> Data:
    """The data of four idx files whose content has these checksums."""
    arrays = []
    for path, (name, md5) in zip(paths, content.items(), strict=True):
        raw = read(path)
        arrays.append(parse_idx(path, raw, axes=3 if "images" in name else 1))
        check(path, raw, md5)
    train_x, train_y, test_x, test_y = arrays
    return Data(_images(train_x), _labels(train_y), _images(test_x), _labels(test_y), len(NAMES), NAMES)


def _images(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / 255)[:, None]


def _labels(labels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
