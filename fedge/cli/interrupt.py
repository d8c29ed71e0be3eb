"""Ctrl-C: once to stop cleanly, twice to end at once. Under torchrun SIGTERM is a wish to stop as well."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any


class Interrupt:
    """While this is entered, the first Ctrl-C only sets a flag; the second is Python's KeyboardInterrupt again."""

    def __init__(self, say: Callable[[], None], also: Sequence[signal.Signals] = ()) -> None:
        self._say = say
        self._signals = (signal.SIGINT, *also)
        self._before: dict[signal.Signals, Any] = {}
        self._wanted = False

    def wanted(self) -> bool:
        """Whether somebody asked to stop."""
        return self._wanted

    def __enter__(self) -> Interrupt:
        self._before = {one: signal.signal(one, self._first) for one in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._say()
