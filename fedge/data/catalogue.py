"""Data sets by name: what they are, where they come from, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedge.checks import nearest
from fedge.data import cifar10, fashion_mnist, speech_commands
from fedge.data.base import Data
from fedge.data.digits import load_digits
from fedge.data.files import Remote
from fedge.data.scale import standardise
from fedge.data.split import hold_out


@dataclass(frozen=True)
class Entry:
    """A data set."""

    load: Callable[..., Data]  # from a path, or None to look in the usual places
    about: str
    licence: str
    find: Callable[[Path | str | None], Path] | None = None  # None: it is part of the library
    files: Callable[[Path], list[Path]] = lambda place: [place]  # what a copy needs of the place that was found
    remotes: tuple[Remote, ...] = ()


LOADERS: dict[str, Entry] = {
    "digits": Entry(load_digits, "1,797 handwritten digits, 8x8", "CC BY 4.0"),
    "fashion_mnist": Entry(
        fashion_mnist.load_fashion_mnist,
        "70,000 images of clothes, 28x28",
        "MIT",
        fashion_mnist.find,
        fashion_mnist.files,
        fashion_mnist.REMOTES,
    ),
    "cifar10": Entry(
        cifar10.load_cifar10,
        "60,000 colour images, 32x32",
        "none stated; cite Krizhevsky 2009",
        cifar10.find,
        cifar10.files,
        cifar10.REMOTES,
    ),
    "speech_commands": Entry(
        speech_commands.load_speech_commands,
        "21,452 spoken key words, 50x16 MFCCs",
        "CC BY 4.0",
        speech_commands.find,
        speech_commands.files,
        speech_commands.REMOTES,
    ),
}


SHORT = {"fmnist": "fashion_mnist", "kws": "speech_commands"}  # what the paper's experiments call them


def entry(name: str) -> Entry:
    if name not in LOADERS:
        meant = f" (did you mean {SHORT[name]!r}?)" if name in SHORT else nearest(name, LOADERS)
        raise ValueError(f"unknown data set {name!r}{meant}; known: {', '.join(LOADERS)}")
    return LOADERS[name]


def load(name: str, path: str | None = None, validation: float = 0.0, standardised: bool = False) -> Data:
    """Load a data set by its name, from a local copy at `path` or from the usual places.

    With `validation` that share of the training set is held out, class by class, and takes the place of the test set:
    for choosing hyper-parameters. `standardised` puts every channel on mean 0 and deviation 1 (`standardise`).

    >>> load("digits").classes
    10
    """
    one = entry(name)
    if path is not None and one.find is None:
        raise ValueError(f"path is {str(path)!r}, but {name} is part of the library: leave it out")
    options: dict[str, Any] = {} if one.find is None else {"path": path}
    data = one.load(**options)
    data = hold_out(data, validation) if validation else data
    return standardise(data) if standardised else data
