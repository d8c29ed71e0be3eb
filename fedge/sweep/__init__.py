"""Sweeps: many runs over grids, seeds and processes, each resumable."""

from fedge.sweep.entries import Entry, entries
from fedge.sweep.files import Files
from fedge.sweep.halving import Choices, tune
from fedge.sweep.runner import Runner, Stopped
from fedge.sweep.store import Store
from fedge.sweep.study import Study
from fedge.sweep.whole import run_sweep

__all__ = ["Choices", "Entry", "Files", "Runner", "Stopped", "Store", "Study", "entries", "run_sweep", "tune"]
