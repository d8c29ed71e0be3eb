"""Which losses of a report may be compared: FedOVA's is that of ten questions with two answers each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedge.report.groups import Group

MARK = " †"
ONE_VS_ALL = "one-vs-all: the mean over the classes of a loss with two answers"


def kind_of(config: Mapping[str, Any]) -> str:
    """What a run's loss measures, as far as its configuration says; empty: the loss of the model's outputs."""
    algorithm, name = config.get("algorithm"), ""
    while isinstance(algorithm, Mapping):
        if str(algorithm.get("name", "")).lower() == "fedova":
            return ONE_VS_ALL
        name = str(algorithm.get("loss", name))
        algorithm = algorithm.get("inner")
    return name


def other_losses(groups: Sequence[Group]) -> dict[int, str]:
    """Position -> kind of the groups whose loss is of another kind than that of most; none if all are of one kind."""
    kinds = [kind_of(group.runs[0].config) for group in groups]
    usual = max(kinds, key=lambda kind: (kind != ONE_VS_ALL, kinds.count(kind)), default="")
    return {at: kind for at, kind in enumerate(kinds) if kind != usual}
