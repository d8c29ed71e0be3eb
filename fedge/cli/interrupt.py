"""Ctrl-C: once to stop cleanly, twice to end at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """While this is entered, the first Ctrl-C only sets a flag; the second is Python's KeyboardInterrupt again."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._before: Any = None
        self._wanted = False

    def wanted(self) -> bool:
        """Whether somebody asked to stop."""
        return self._wanted

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._first)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._say()
