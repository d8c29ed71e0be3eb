"""The edge: devices, a virtual clock, energy, and whom the server waits for; around any algorithm and any link."""

from fedge.edge.clock import Clock
from fedge.edge.cohorts import Choice
from fedge.edge.devices import Devices, Fleet, Profiles
from fedge.edge.fairness import accuracy_by_kind, by_kind
from fedge.edge.policies import Deadline, FirstOf, PartialWork, WaitForAll
from fedge.edge.table import Table
from fedge.edge.wireless import Cell

__all__ = [
    "Cell",
    "Choice",
    "Clock",
    "Deadline",
    "Devices",
    "FirstOf",
    "Fleet",
    "PartialWork",
    "Profiles",
    "Table",
    "WaitForAll",
    "accuracy_by_kind",
    "by_kind",
]
