"""How a simulation is computed, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fedge.core import Algorithm
from fedge.engine.hardware.budget import has_convolutions
from fedge.engine.hardware.device import place
from fedge.engine.ranks.process_group import Group
from fedge.engine.ranks.ranks import Ranks
from fedge.engine.recording.c_library import there_is_a_compiler
from fedge.engine.runtime import Precision
from fedge.engine.simulator import Simulator
from fedge.engine.ways import Way
from fedge.federation import Federation

LONG = 1000  # rounds


@dataclass(frozen=True)
class Engine:
    """The device and its precision, whether steps are compiled, and how many clients are computed at once.

    None lets the engine choose; `fedge.engine.Simulator` says what each of them does. For `compile` it chooses by the
    length of the run: on a CPU, runs of a thousand rounds and more repay the second that a C compiler takes.
    """

    device: str = "cpu"
    precision: Precision = "fp32"
    compile: bool | None = None
    chunk: int | None = None
    workers: int | None = None
    way: Way | None = None

    def expecting(self, algorithm: Algorithm[Any], rounds: int) -> Engine:
        """The same for a run of so many rounds."""
        if self.compile is not None or place(self.device).type != "cpu" or rounds < LONG:
            return self
        return replace(self, compile=not has_convolutions(algorithm.model) and there_is_a_compiler())

    def link(
        self, algorithm: Algorithm[Any], federation: Federation, group: Group | None = None, **options: Any
    ) -> Simulator | Ranks:
        """A simulator with these settings, or one on every rank of a group."""
        chosen = asdict(self) | options
        if group is not None and group.size > 1:
            return Ranks(algorithm, federation, group=group, **chosen)
        return Simulator(algorithm, federation, **chosen)
