"""Data sets as four tensors: built in, from official files, from arrays, or from torch data sets."""

from fedge.data.arrays import from_arrays, from_datasets
from fedge.data.base import Data
from fedge.data.catalogue import load
from fedge.data.errors import DataError
from fedge.data.padding import pad
from fedge.data.scale import standardise
from fedge.data.split import hold_out

__all__ = ["Data", "DataError", "from_arrays", "from_datasets", "hold_out", "load", "pad", "standardise"]
