"""Key words: ten words of Speech Commands v0.01 as 50 x 16 MFCCs, the paper's KWS data set.

P. Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition", 2018 (Google, CC BY 4.0). The ten
words have 23,659 clips; 21,452 of them are exactly one second long, the paper's count, and the others are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedge import regular
from fedge.data.base import Data
from fedge.data.errors import DataError
from fedge.data.features import Features, read_features, write_features
from fedge.data.files import Remote, check_file, members
from fedge.data.mfcc import MOST, mfcc, samples
from fedge.data.places import home, locate, looking
from fedge.data.split import stratified

WORDS = ("one", "two", "three", "four", "five", "down", "left", "right", "stop", "go")
CLIPS, SECONDS, TEST = 23_659, 21_452, 1_452  # of the ten words; of one second; of those, for the test
PREPARED = "kws_mfcc_50x16.npz"
ARCHIVE = "speech_commands_v0.01.tar.gz"
LIST = "testing_list.txt"  # beside the folders of words
FOLDERS = ("", "speech_commands_v0.01/")
MARKERS = (PREPARED, *(f"{sub}{LIST}" for sub in FOLDERS), ARCHIVE)
REMOTES = (
    Remote(
        f"http://download.tensorflow.org/data/{ARCHIVE}",
        "sha256:743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
    ),
)


@looking()
def find(path: Path | str | None = None) -> Path:
    """Prepared features, the folder of folders of WAV files, or the official archive; the first that there is."""
    if path is not None and (Path(path) / WORDS[0]).is_dir():
        return Path(path)  # a copy of the folders without the lists
    if path is not None and Path(path).suffix == ".npz" and Path(path).is_file():
        return Path(path)
    found = locate("speech_commands", path, MARKERS)
    return found.parent if found.name == LIST else found


def files(place: Path) -> list[Path]:
    """Features and the archive as they are; of the folders of WAV files, the features computed from them."""
    if place.is_file():
        return [place]
    features(place, SECONDS)
    return [_cache(place)]


def load_speech_commands(path: Path | str | None = None) -> Data:
    """20,000 train and 1,452 test clips [1, 50 frames, 16 coefficients], every coefficient standardised.

    The split is stratified and always the same; mean and deviation are those of the training clips. `owners` are the
    speakers, of whom most have clips in both parts.
    """
    return split(features(find(path), SECONDS), TEST)


def features(place: Path, seconds: int) -> Features:
    """All one-second clips of the ten words, from a prepared file or computed from audio, once."""
    found = read_features(place) if place.suffix == ".npz" else _computed(place, seconds)
    if found.classes != WORDS:
        raise DataError(f"{place} has the words {', '.join(found.classes)}, expected {', '.join(WORDS)}")
    if len(found.label) != seconds:
        raise DataError(
            f"{place} has {len(found.label):,} clips of one second, Speech Commands v0.01 has {seconds:,} of these "
            "words: it is incomplete or another version"
        )
    return found


def _computed(place: Path, seconds: int) -> Features:
    """From the cache, or from the audio and into the cache."""
    cached = _cache(place)
    if cached.is_file():
        return read_features(cached)
    if place.is_file():
        check_file(place, REMOTES[0].checksum)
    found = from_audio(place)
    if len(found.label) == seconds:
        write_features(cached, found)
        return read_features(cached)  # the same numbers now as later
    return found


def _cache(place: Path) -> Path:
    return home() / "speech_commands" / f"mfcc-{_fingerprint(place)}.npz"


def from_audio(place: Path) -> Features:
    """The features of every one-second clip, by word and then by name."""
    heard = [(name, one) for name, content in _clips(place) if (one := samples(place / name, content)) is not None]
    heard.sort(key=lambda pair: (WORDS.index(pair[0].split("/")[0]), pair[0]))
    names = tuple(name for name, _ in heard)
    labels = np.array([WORDS.index(name.split("/")[0]) for name in names], dtype=np.int64)
    return Features(mfcc(one for _, one in heard), labels, names, WORDS)


def _clips(place: Path) -> Iterator[tuple[str, bytes]]:
    """(word/name.wav, content) of the ten words."""
    if place.is_file():
        for name, content in members(place):
            if name.split("/")[0] in WORDS and name.endswith(".wav"):
                yield name, content
        return
    for path in _listing(place):
        try:
            content = regular.content(path, MOST)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        yield f"{path.parent.name}/{path.name}", content


def _listing(folder: Path) -> list[Path]:
    missing = [word for word in WORDS if not (folder / word).is_dir()]
    if missing:
        raise DataError(f"{folder} has no folder {', '.join(missing)}: get the official archive again")
    return [path for word in WORDS for path in sorted((folder / word).glob("*.wav"))]


def _fingerprint(place: Path) -> str:
    """Changes when a file is added, removed or rewritten."""
    paths = [place] if place.is_file() else _listing(place)
    lines = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def split(found: Features, test: int) -> Data:
    """Standardised, and cut into a training and a test part."""
    away = stratified(found.label, test)
    mean, deviation = found.mfcc[~away].mean((0, 1)), found.mfcc[~away].std((0, 1))  # [16]
    x = (found.mfcc - mean) / deviation
    tested = _examples(x[away]), _labels(found.label[away])
    owners = tuple(speaker(clip) for clip, out in zip(found.clip, away, strict=True) if not out)
    return Data(_examples(x[~away]), _labels(found.label[~away]), *tested, 10, WORDS, owners=owners)


def speaker(clip: str) -> str:
    """Who spoke a clip: its name begins with a hash of them.

    >>> speaker("one/00176480_nohash_0.wav")
    '00176480'
    """
    return clip.rpartition("/")[2].partition("_")[0]


def _examples(x: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))[:, None]


def _labels(labels: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(labels)
