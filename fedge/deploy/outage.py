"""Notices when the SuperLink was away: Flower's grid retries by itself, and only its log tells for how long."""

from __future__ import annotations

import logging

_BACK = "Connection successful after"  # followed by the seconds and the number of tries


class Outages(logging.Handler):
    """Collects, while it is attached to Flower's logger, how long connections were lost."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(_BACK) and isinstance(record.args, tuple) and record.args:
            self._seconds.append(float(str(record.args[0])))

    def take(self) -> list[str]:
        """What happened since the last look; several calls notice the same outage; the longest counts."""
        seconds, self._seconds = self._seconds, []
        return [f"the SuperLink did not answer for {max(seconds):.1f} s"] if seconds else []

    def attach(self) -> None:
        logging.getLogger("flwr").addHandler(self)

    def detach(self) -> None:
        logging.getLogger("flwr").removeHandler(self)
