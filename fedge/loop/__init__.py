"""Training: drive an algorithm over a link, round by round, and keep the record."""

from fedge.loop.drawing import Sampling, cohorts
from fedge.loop.entry import train
from fedge.loop.training import warm_up

__all__ = ["Sampling", "cohorts", "train", "warm_up"]
