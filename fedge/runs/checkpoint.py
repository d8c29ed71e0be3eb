"""Checkpoints: written atomically, loaded with weights_only, refused with the reason when foreign or damaged.

A file is what `torch.save` writes, a ZIP archive, so `torch.load(path, weights_only=True)` reads it anywhere. Its
checksum is the comment of the archive.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import torch

from fedge.runs import archive, atomic, regular

FIRST = b"fedge checkpoint 1\n"  # began the files of earlier versions
MAGIC = b"fedge checkpoint 2 "
COMMENT = len(MAGIC) + 8
PARTS, DEPTH = 5_000_000, 100  # of what a checkpoint holds, at most
SAME = 1 << 24  # bytes that one number may stand for


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


def save(path: Path, content: dict[str, Any]) -> None:
    """A nest of dicts, lists, tuples, tensors, numbers, strings and None."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    body = buffer.getvalue()
    assert body.endswith(b"\0\0")  # an archive ends with the length of its comment
    body = body[:-2] + COMMENT.to_bytes(2, "little")
    atomic.write_atomically(path, body + MAGIC + _sum(body))


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote; tensors on the CPU."""
    try:
        raw = regular.content(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is too large'}"
        ) from None
    body = _body(path, raw)
    try:
        archive.check_layout(body)
        content = torch.load(archive.Counted(body), weights_only=True, map_location="cpu")
    except archive.NotAsWritten as error:
        raise CheckpointError(f"{path} holds what no checkpoint holds ({error}): delete it") from None
    except Exception as error:  # torch tells of foreign objects and of damage in many ways
        raise CheckpointError(f"{path} holds what no checkpoint holds ({type(error).__name__}): delete it") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected the dict of a checkpoint")
    _check_parts(path, content)
    return content


def _check_parts(path: Path, content: dict[str, Any]) -> None:
    """A list may be in another one any number of times: a few kB then take for ever to look at."""
    left, todo = PARTS, [iter([content])]
    while todo:
        for one in todo[-1]:
            left -= 1
            inside = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else None
            if left < 0 or len(todo) > DEPTH:
                raise CheckpointError(f"{path} holds more than {PARTS} parts, or parts {DEPTH} deep: delete it")
            if isinstance(one, torch.Tensor) and not _is_plain(one):
                raise CheckpointError(f"{path} holds a tensor that no checkpoint holds ({one.layout}): delete it")
            if inside is not None:
                todo.append(iter(inside))
                break
        else:
            todo.pop()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers are in the file; one number may stand for a few others, not for gigabytes of them."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= max(SAME, tensor.untyped_storage().nbytes())


def _body(path: Path, raw: bytes) -> bytes:
    """What torch reads of a file, if it is as it was written."""
    if raw.startswith(FIRST):
        body = raw[len(FIRST) + 4 :]
        whole = zlib.crc32(body).to_bytes(4, "big") == raw[len(FIRST) : len(FIRST) + 4]
    elif raw.startswith(b"PK\3\4") and raw[-22:-18] != b"PK\5\6":  # a whole archive without a comment is not ours
        body = raw
        whole = raw[-COMMENT:] == MAGIC + _sum(raw[:-COMMENT])
    else:
        raise CheckpointError(f"{path} is not a checkpoint of this version of fedge")
    if not whole:
        raise CheckpointError(f"{path} is damaged: its checksum does not match ({len(raw)} bytes)")
    return body


def _sum(body: bytes) -> bytes:
    return f"{zlib.crc32(body):08x}".encode()
