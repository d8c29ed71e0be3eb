"""The table [edge] of an experiment file: which devices the clients have, and whom the server waits for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fedge.checks import positive
from fedge.edge.clock import Clock
from fedge.edge.cohorts import Choice
from fedge.edge.devices import Fleet, Profiles
from fedge.edge.policies import Deadline, FirstOf, PartialWork
from fedge.edge.profiles import Kind, NetworkName
from fedge.edge.table import Table
from fedge.edge.wireless import Cell
from fedge.engine.links.base_link import BaseLink
from fedge.federation import Federation

DRAWN = ("profile", "network", "spread", "correlation", "availability")  # what says how devices are drawn


@dataclass(frozen=True)
class Edge:
    """The fields of [edge].

    Devices are those of a `file` (CSV), of a wireless `cell`, or else of a `profile`, or several with equal shares, on
    its usual `network` or another one.
    """

    profile: Kind | tuple[Kind, ...] = "phone"
    network: NetworkName | None = None
    spread: float = 1.0
    correlation: float = 0.0
    availability: float = 1.0
    seed: int = 0
    cell: Cell | None = None
    file: str | None = None
    policy: Deadline | FirstOf | PartialWork | None = None
    stay: float | None = None
    choose: Literal["speed", "labels"] | None = None
    among: int = 3

    def __post_init__(self) -> None:
        positive("stay", self.stay, optional=True)
        if self.cell is not None and self.file is not None:
            raise ValueError("there are a cell and a file: devices come from one of them")
        source = "a file" if self.file is not None else "a cell" if self.cell is not None else None
        for one in fields(self):
            value = getattr(self, one.name)
            if source is not None and one.name in DRAWN and value != one.default:
                raise ValueError(f"{one.name} is {value!r}, but devices come from {source}: leave one of them out")
        if source is None and self.correlation and self.spread == 1:
            raise ValueError(
                f"correlation is {self.correlation:g}, but spread is 1, so that all devices of a kind are alike: set "
                "spread as well, or leave it out"
            )

    def fleet(self, clients: int) -> Fleet:
        if self.file is not None:
            return Table(self.file, clients, self.seed)
        if self.cell is not None:
            return self.cell
        return Profiles(self.profile, self.network, self.spread, self.correlation, self.availability, self.seed)

    def clock(self, link: BaseLink, federation: Federation) -> Clock:
        """The link with a clock around it."""
        choice = None if self.choose is None else Choice(self.choose, self.among)
        return Clock(link, federation, self.fleet(federation.clients), self.policy, stay=self.stay, choice=choice)
