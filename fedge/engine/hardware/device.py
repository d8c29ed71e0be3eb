"""The device that a link was told, if torch has it here."""

from __future__ import annotations

import torch


def place(device: torch.device | str) -> torch.device:
    """A device that can be used; "auto" is a CUDA device if there is one, or else the CPU."""
    cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}, it must be 'auto', 'cpu', 'cuda', 'cuda:1' or the like") from None
    if found.type == "cuda" and (not cuda or (found.index or 0) >= torch.cuda.device_count()):
        there = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if cuda else []
        raise ValueError(f"device is {str(device)!r}, torch has here: {', '.join(['cpu', *there])}")
    return found
