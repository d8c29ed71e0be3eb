"""Rules that turn the uploads of a phase into one reply: one file per rule."""

from fedge.combine.clipped_mean import ClippedMean
from fedge.combine.gather import Gather
from fedge.combine.krum import Krum
from fedge.combine.median import Median
from fedge.combine.trimmed_mean import TrimmedMean
from fedge.core import Combine, Mean

COMBINERS: dict[str, type[Combine]] = {
    "mean": Mean,
    "gather": Gather,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "clipped_mean": ClippedMean,
}

__all__ = ["COMBINERS", "ClippedMean", "Gather", "Krum", "Mean", "Median", "TrimmedMean"]
