"""Pickles that may hold arrays and plain values, and nothing that runs code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from fedge.data.errors import DataError

# By name in the pickle; numpy renamed its inner modules, so its functions are taken from an array instead.
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}")
        return ALLOWED[module, name]


def load_arrays(where: object, content: bytes) -> Any:
    """What a pickle holds, the strings of Python 2 as bytes; `where` names the file in errors."""
    try:
        return _Arrays(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{where} is no pickle of arrays: {error or type(error).__name__}") from None
