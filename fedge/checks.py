"""Checks at the border: the value, the limit, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

LARGEST = 3e38  # the range of single precision, in which most models are
MOST = 2**31 - 1  # steps, examples or clients
CLOSE = 0.75  # of 1; below it the "nearest" word is often an unrelated one
LOOSE, FEW = 0.65, 6  # where the words are so few, and all are said as well, a bolder guess does no harm


def _number(name: str, value: Any, none: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or (not isinstance(value, Integral) and value != value):
        raise ValueError(f"{name} is {brief(value)}, it must be a finite number{none}")
    if not -LARGEST <= value <= LARGEST:  # type: ignore[operator]
        raise ValueError(f"{name} is {brief(value)}, it must be a finite number of at most {LARGEST:g}{none}")
    return float(value)


def brief(value: Any, most: int = 100) -> str:
    """A value as Python writes it, cut short: the whole may be megabytes."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def finite(name: str, value: Any) -> None:
    _number(name, value)


def positive(name: str, value: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    none = ', or None ("none" in a file)' if optional else ""
    if _number(name, value, none) <= 0:
        raise ValueError(f"{name} is {value}, it must be greater than 0{none}")


def non_negative(name: str, value: Any) -> None:
    if _number(name, value) < 0:
        raise ValueError(f"{name} is {value}, it must be 0 or more")


def unit_interval(name: str, value: Any) -> None:
    if not 0 <= _number(name, value) < 1:
        raise ValueError(f"{name} is {value}, it must be at least 0 and below 1")


def at_least_one(name: str, value: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    none = ', or None ("none" in a file)' if optional else ""
    none += " for all examples in one batch" if optional and name == "batch_size" else ""
    _whole(name, value, 1, none)


def at_least_zero(name: str, value: Any) -> None:
    _whole(name, value, 0)


def _whole(name: str, value: Any, least: int, none: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} is {brief(value)}, it must be a whole number of at least {least}{none}")
    if int(value) > MOST:
        raise ValueError(f"{name} is {brief(value)}, it must be at most {MOST}{none}")


def choice(name: str, value: Any, known: Iterable[str]) -> None:
    """One of a few words; a typo names the nearest."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{name} is {brief(value)}{guess(value, known)}, it must be one of {known}")


def nearest(word: Any, known: Iterable[str], cutoff: float = CLOSE) -> str:
    """' (did you mean ...?)', or nothing when no known word is close."""
    spelt = {one.lower(): one for one in known}  # capitals are no difference
    close = difflib.get_close_matches(str(word).lower(), list(spelt), n=1, cutoff=cutoff)
    return f" (did you mean {spelt[close[0]]!r}?)" if close else ""


def guess(word: Any, known: Iterable[str]) -> str:
    """`nearest` for errors that say all known words as well."""
    known = list(known)
    return nearest(word, known, LOOSE if len(known) <= FEW else CLOSE)
