"""Notices when the SuperLink was away: Flower's grid retries by itself, and only its log tells for how long.

What had to be sent again is told by our own log.
"""

from __future__ import annotations

import logging

LOGS = ("flwr", "fedge.deploy.post")
_BACK = "Connection successful after"  # followed by the seconds and the number of tries


class Outages(logging.Handler):
    """Collects, while it is attached to Flower's logger, how long connections were lost."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._seconds: list[float] = []
        self._told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == LOGS[1]:
            self._told.append(record.getMessage())
        elif str(record.msg).startswith(_BACK) and isinstance(record.args, tuple) and record.args:
            self._seconds.append(float(str(record.args[0])))

    def take(self) -> list[str]:
        """What happened since the last look; several calls notice the same outage; the longest counts."""
        seconds, told, self._seconds, self._told = self._seconds, self._told, [], []
        return [*([f"the SuperLink did not answer for {max(seconds):.1f} s"] if seconds else []), *told]

    def attach(self) -> None:
        for name in LOGS:
            logging.getLogger(name).addHandler(self)

    def detach(self) -> None:
        for name in LOGS:
            logging.getLogger(name).removeHandler(self)
