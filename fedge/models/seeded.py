"""Reproducible initialisation that leaves the global random state alone."""

from collections.abc import Callable

import torch
from torch import nn

WIDEST = 1e6  # times as wide as a network is written


def seeded(build: Callable[[], nn.Sequential], seed: int | None) -> nn.Sequential:
    """Build a model whose initial parameters depend on the seed alone.

    Parameters are drawn on the CPU and then moved, so they are the same on every default device;
    `None` draws them from torch's global generator as usual.

    >>> torch.equal(*(seeded(lambda: nn.Sequential(nn.Linear(2, 1)), 7)[0].bias for _ in "ab"))
    True
    """
    if seed is None:
        return build()
    device = torch.get_default_device()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed, which would also reseed every GPU.
        torch.default_generator.manual_seed(seed)
        model = build()
    return model.to(device)


def scaled(widths: tuple[int, ...], by: float) -> tuple[int, ...]:
    """Layer widths multiplied, rounded, at least one.

    >>> scaled((16, 32, 512), 0.25)
    (4, 8, 128)
    """
    if not 0 < by <= WIDEST:
        raise ValueError(f"width is {by}, must be greater than 0 and at most {WIDEST:g}: 0.5 halves every layer")
    return tuple(max(1, round(width * by)) for width in widths)


def check_widths(**widths: int) -> None:
    """Refuse layer widths below one.

    >>> check_widths(outputs=10)
    """
    for name, width in widths.items():
        if width < 1:
            raise ValueError(f"{name} is {width}, must be at least 1")
