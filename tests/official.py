"""Small files in the official formats of the data sets, made by hand."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import wave
from pathlib import Path
from typing import ClassVar

import numpy as np

FASHION = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def fashion(folder: Path, zipped: bool = True, train: int = 30, test: int = 10) -> dict[str, str]:
    """Four idx files; returns the checksums of their content."""
    draw = np.random.default_rng(0)
    arrays = (
        draw.integers(0, 256, (train, 28, 28)),
        np.arange(train) % 10,
        draw.integers(0, 256, (test, 28, 28)),
        np.arange(test) % 10,
    )
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: idx(array) for name, array in zip(FASHION, arrays, strict=True)}
    for name, content in contents.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    return {name: md5(content) for name, content in contents.items()}


def cifar_rows(rows: int = 3) -> list[np.ndarray]:
    """Six batches [rows, 3073]: label, then pixels."""
    draw = np.random.default_rng(1)
    pixels = draw.integers(0, 256, (6, rows, 3072), dtype=np.uint8)
    labels = draw.integers(0, 10, (6, rows, 1), dtype=np.uint8)
    return list(np.concatenate([labels, pixels], 2))


def cifar_binary() -> dict[str, bytes]:
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    return {name: rows.tobytes() for name, rows in zip(names, cifar_rows(), strict=True)}


class Python2(pickle._Pickler):  # the form in Python, whose writers can be replaced
    """Writes strings of both kinds as Python 2 wrote its own."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def cifar_pickled() -> dict[str, bytes]:
    """Protocol 2, numpy by its old module name."""
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    found = {}
    for name, rows in zip(names, cifar_rows(), strict=True):
        buffer = io.BytesIO()
        Python2(buffer, protocol=2).dump({"data": rows[:, 1:].copy(), "labels": rows[:, 0].tolist()})
        found[name] = buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    return found


def archive(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def wav(samples: int = 16_000, seed: int = 0, rate: int = 16_000, channels: int = 1) -> bytes:
    """A tone with noise."""
    draw = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * (200 + 50 * seed) * np.arange(samples * channels) / rate)
    values = (8000 * tone + 500 * draw.standard_normal(samples * channels)).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.tobytes())
    return buffer.getvalue()
