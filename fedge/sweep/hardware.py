"""The machine that a number was measured on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def hardware(device: str) -> str:
    """The GPU's own name, or the CPU's and how many threads it has.

    >>> bool(hardware("cpu"))
    True
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} threads"


def _processor() -> str:
    """From /proc/cpuinfo on Linux; elsewhere what Python's platform module says."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", "replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
