"""Prepared features of key words in one .npz file, so that training needs neither audio nor an audio library.

mfcc     int16 [N, 50, 16]; the value in dB is mfcc * scale + mean
scale    float32 [16]                     mean     float32 [16]
label    uint8 [N], a position in classes classes  bytes [10], the words
clip     bytes [N], e.g. b"one/00176480_nohash_0.wav" (for people; other entries are ignored)
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedge import atomic, regular
from fedge.data.errors import DataError

FRAMES, COEFFICIENTS = 50, 16
LARGEST = 32767
MOST = 1 << 28  # bytes, unpacked; those of the data set are 63 MB


@dataclass(frozen=True)
class Features:
    """MFCCs in dB, float32 [N, 50, 16], with labels and clip names; ordered by class, then by clip."""

    mfcc: NDArray[np.float32]
    label: NDArray[np.int64]
    clip: tuple[str, ...]
    classes: tuple[str, ...]


def read_features(path: Path) -> Features:
    """The file, all of it checked."""
    try:
        raw = io.BytesIO(regular.content(path, MOST))
        _weigh(path, raw)
        with np.load(raw, allow_pickle=False) as stored:
            found = {name: stored[name] for name in ("mfcc", "scale", "mean", "label", "clip", "classes")}
    except KeyError as error:
        raise DataError(f"{path} is no file of prepared features: {error.args[0]}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (DataError, MemoryError):
        raise
    except Exception as error:  # NumPy and zipfile tell of damage in many ways
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} is truncated or damaged: {told}") from None
    _check(path, found)
    mfcc = found["mfcc"].astype(np.float32) * found["scale"] + found["mean"]
    words = tuple(word.decode() for word in found["classes"].tolist())
    clips = tuple(clip.decode() for clip in found["clip"].tolist())
    return Features(mfcc.astype(np.float32), found["label"].astype(np.int64), clips, words)


def _weigh(path: Path, raw: io.BytesIO) -> None:
    """A file of a megabyte can be unpacked to gigabytes."""
    with zipfile.ZipFile(raw) as archive:
        size = sum(one.file_size for one in archive.infolist())
    if size > MOST:
        raise DataError(f"{path} unpacks to {size >> 20} MiB, no file of prepared features has more than {MOST >> 20}")
    raw.seek(0)


def _check(path: Path, found: dict[str, NDArray[np.generic]]) -> None:
    if found["label"].ndim != 1:
        raise DataError(f"{path}: label has shape {found['label'].shape}, expected one number a clip")
    count = len(found["label"])
    shapes = {
        "mfcc": (count, FRAMES, COEFFICIENTS),
        "scale": (COEFFICIENTS,),
        "mean": (COEFFICIENTS,),
        "clip": (count,),
    }
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise DataError(f"{path}: {name} has shape {found[name].shape}, expected {shape}")
    kinds = {"mfcc": "i", "scale": "f", "mean": "f", "label": "u", "clip": "S", "classes": "S"}
    for name, kind in kinds.items():
        if found[name].dtype.kind != kind:
            raise DataError(f"{path}: {name} has dtype {found[name].dtype}, which is not of that format")
    if count and int(found["label"].max()) >= len(found["classes"]):
        raise DataError(f"{path}: label {found['label'].max()} has no word, there are {len(found['classes'])}")
    if not all(bytes(one).isascii() for name in ("clip", "classes") for one in found[name].ravel().tolist()):
        raise DataError(f"{path}: names of clips or words are no plain text")
    for name in ("scale", "mean"):
        values = found[name].astype(np.float64)
        if not np.isfinite(values).all() or (name == "scale" and (values <= 0).any()):
            raise DataError(f"{path}: {name} has values that are not {'positive and ' * (name == 'scale')}finite")
    _check_clips(path, found["clip"].tolist(), found["classes"][found["label"]].tolist())


def _check_clips(path: Path, clips: list[bytes], words: list[bytes]) -> None:
    """Every clip once, and under the word that its name begins with."""
    if len(set(clips)) != len(clips):
        raise DataError(f"{path}: {len(clips) - len(set(clips))} clips are there more than once")
    for clip, word in zip(clips, words, strict=True):
        if clip.split(b"/")[0] != word:
            raise DataError(f"{path}: clip {clip.decode()} is labelled {word.decode()!r}")


def write_features(path: Path, features: Features) -> None:
    """16 bits a value: an error of half a step, at most about 0.03 dB; written whole or not at all."""
    low, high = features.mfcc.min((0, 1)), features.mfcc.max((0, 1))  # [16]
    mean = ((low + high) / 2).astype(np.float32)
    scale = np.maximum((high - low) / (2 * LARGEST), np.finfo(np.float32).tiny).astype(np.float32)
    steps = np.clip(np.rint((features.mfcc - mean) / scale), -LARGEST, LARGEST).astype(np.int16)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        mfcc=steps,
        scale=scale,
        mean=mean,
        label=features.label.astype(np.uint8),
        clip=np.array([clip.encode() for clip in features.clip]),
        classes=np.array([word.encode() for word in features.classes]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_atomically(path, buffer.getvalue())
