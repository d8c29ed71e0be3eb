"""The device that an experiment names, if this machine has it."""

from __future__ import annotations

import torch

from fedge.experiment.errors import ExperimentError


def find(name: str) -> str:
    """A device torch can use here; "auto" is the first CUDA device, or else the CPU.

    >>> find("cpu")
    'cpu'
    """
    known = available()
    if name == "auto":
        return "cuda" if "cuda" in known else "cpu"
    if name not in known:
        there = ", ".join(["auto", *known])
        raise ExperimentError(f"train: device is {name!r}, on this machine there is: {there}")
    return name


def available() -> list[str]:
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(["cuda"] if cuda else []), *cuda, *mps]
