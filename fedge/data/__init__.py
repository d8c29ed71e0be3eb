"""Data sets as four tensors: built in, from arrays, or from torch data sets."""

from fedge.data.arrays import from_arrays, from_datasets
from fedge.data.base import Data
from fedge.data.catalogue import load

__all__ = ["Data", "from_arrays", "from_datasets", "load"]
