"""Whether two configurations are of one run: what may differ between a checkpoint and the run that goes on from it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from fedge import toml

MAY_DIFFER = {
    "train.rounds",
    "train.checkpoint_every",
    "train.device",
    "train.metrics",
    "train.keep",
    "train.until",
    "train.per_client",
    "data.path",
}  # between the checkpoint and the run that goes on from it
LATER: dict[str, tuple[Any, ...]] = {
    "clip": (None, "none"),
    "inner_decay": (1.0,),
    "carry_momentum": (False,),
    "products": ("same",),
    "quintics": ("jordan",),
    "dampings": ((), []),
    "direction": ("pairs",),
    "until": (None, "none"),
    "keep": ("last",),
    "way": (None, "none"),
    "sampling": (None, "none"),
    "metrics": ((), []),
    "per_client": (False,),
    "loss": ("cross_entropy",),
    "width": (1.0,),
    "server_lr_decay": (1.0,),
    "server_warmup": (0,),
    "head": ("",),
    "classes": (None, "none"),
    "of": ("client",),
    "balanced": (False,),
    "portion": (1.0,),
    "warm_up": (0,),
    "warm_up_lr": (None, "none"),
    "standardised": (False,),
    "dropout": (0.0,),
}  # fields that came after the first runs, and the values with which they do nothing
LATER_FOR_SOME: dict[str, tuple[Any, ...]] = {
    "server_momentum": (0.0,),
    "server_optimiser": ("sgd",),
    "server_betas": ([0.9, 0.99], (0.9, 0.99)),
    "server_eps": (0.001,),
}  # FedCM and SCAFFOLD got these later, FedAvg had them from the start: a run may go on, but its name has them


def as_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as it reads back from its file, so that two of them can be compared."""
    return tomllib.loads(toml.dump(config))


def does_nothing(name: str, value: Any) -> bool:
    """Whether a field that came later has the value with which a run is what it was before."""
    return name in LATER and value in LATER[name]


def _did_nothing(name: str, value: Any) -> bool:
    """The same of a field that is not in an earlier run's folder."""
    return does_nothing(name, value) or (name in LATER_FOR_SOME and value in LATER_FOR_SOME[name])


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """(dotted name, old value, new value) of the first field that differs and must not."""
    if path in MAY_DIFFER or (path.startswith("code.") and path.endswith(".path")):  # a file may move
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old and not _did_nothing(key, new[key]))]:
            found = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found is not None:
                return found
        return None
    return None if old == new or _same_loss(path, old, new) else (path, old, new)


def _same_loss(path: str, old: Any, new: Any) -> bool:
    """The default had another name before it took floating-point targets."""
    return path.endswith("loss") and {old, new} == {"cross_entropy", "by_target"}
