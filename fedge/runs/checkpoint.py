"""Checkpoints: written atomically, loaded with weights_only, refused with the reason when foreign or damaged."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import torch

from fedge.runs import atomic

MAGIC = b"fedge checkpoint 1\n"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def save(path: Path, content: dict[str, Any]) -> None:
    """A nest of dicts, lists, tuples, tensors, numbers, strings and None, with a checksum in front."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    body = buffer.getvalue()
    atomic.write_atomically(path, MAGIC + zlib.crc32(body).to_bytes(4, "big") + body)


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote; tensors on the CPU."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    if not raw.startswith(MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of this version of fedge")
    checksum, body = raw[len(MAGIC) : len(MAGIC) + 4], raw[len(MAGIC) + 4 :]
    if zlib.crc32(body).to_bytes(4, "big") != checksum:
        raise CheckpointError(f"{path} is damaged: its checksum does not match ({len(raw)} bytes)")
    content: dict[str, Any] = torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    return content
