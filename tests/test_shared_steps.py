"""Settings that are numbers do not change a recorded step: the compiler sees one text, and a grid compiles once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import fedge
from fedge.engine.recording import pytree
from fedge.engine.recording.graph_passes import simplify, split_updates
from fedge.engine.recording.recorder import Traced
from tests.cases import ragged, toy_data, toy_model

Setting = dict[str, Any]
SIZES: tuple[Setting, Setting] = ({"lr": 0.1}, {"lr": 0.01})
METHODS: dict[str, tuple[Callable[..., Any], tuple[Setting, Setting]]] = {
    "sgd": (fedge.FedAvg, SIZES),
    "adam": (fedge.FedAvg, ({"optimiser": "adam", "lr": 0.1}, {"optimiser": "adam", "lr": 0.01})),
    "spectral": (fedge.FedAvg, ({"optimiser": "spectral", "lr": 0.1}, {"optimiser": "spectral", "lr": 0.01})),
    "fedcm": (fedge.FedCM, ({"lr": 0.1, "alpha": 0.5}, {"lr": 0.3, "alpha": 0.2})),
    "fednova": (fedge.FedNova, SIZES),
    "scaffold": (fedge.SCAFFOLD, SIZES),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shrinking", [{}, {"lr_decay": 0.9, "inner_decay": 0.5}])
def test_other_step_sizes_are_the_same_text(name: str, shrinking: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    make, settings = METHODS[name]
    texts: list[list[str]] = []
    record = Traced._graph

    def watched(self: Traced, leaves: list[Tensor], spec: Any) -> Any:
        graph = record(self, leaves, spec)
        parted = copy.deepcopy(graph)
        simplify(parted)
        sent, carry, *_ = (len(pytree.leaves(part)) for part in pytree.unflatten(list(leaves), spec))
        split_updates(parted, range(sent, sent + carry))
        texts[-1].append(parted.code)
        return graph

    monkeypatch.setattr(Traced, "_graph", watched)
    for setting in settings:
        texts.append([])
        fedge.train(make(toy_model(), **setting, **shrinking), ragged(toy_data()), rounds=4, cohort=5, seed=1)
    assert texts[0], "nothing was recorded"
    assert texts[0] == texts[1]
