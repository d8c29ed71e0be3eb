"""How a simulation is computed, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fedge.core import Algorithm
from fedge.engine.ranks.process_group import Group
from fedge.engine.ranks.ranks import Ranks
from fedge.engine.runtime import Precision
from fedge.engine.simulator import Simulator
from fedge.engine.ways import Way
from fedge.federation import Federation


@dataclass(frozen=True)
class Engine:
    """The device and its precision, whether steps are compiled, and how many clients are computed at once.

    None lets the engine choose; `fedge.engine.Simulator` says what each of them does.
    """

    device: str = "cpu"
    precision: Precision = "fp32"
    compile: bool = False
    chunk: int | None = None
    workers: int | None = None
    way: Way | None = None

    def link(
        self, algorithm: Algorithm[Any], federation: Federation, group: Group | None = None, **options: Any
    ) -> Simulator | Ranks:
        """A simulator with these settings, or one on every rank of a group."""
        chosen = asdict(self) | options
        if group is not None and group.size > 1:
            return Ranks(algorithm, federation, group=group, **chosen)
        return Simulator(algorithm, federation, **chosen)
