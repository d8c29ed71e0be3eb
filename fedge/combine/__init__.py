"""Rules that turn the uploads of a phase into one reply: one file per rule."""

from fedge.combine.bounded_mean import BoundedMean
from fedge.combine.clipped_mean import ClippedMean
from fedge.combine.gather import Gather, Limited
from fedge.combine.krum import Krum
from fedge.combine.median import Median
from fedge.combine.trimmed_mean import TrimmedMean
from fedge.core import Mean

__all__ = ["BoundedMean", "ClippedMean", "Gather", "Krum", "Limited", "Mean", "Median", "TrimmedMean"]
