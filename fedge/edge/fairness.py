"""What a policy does to those who are left out: accuracy by kind of device.

    accuracy of a kind = sum_c p(c | kind) * test accuracy of class c

where p(c | kind) is the share of class c among all examples that clients of the kind hold. A fleet of one kind is cut
into its slow, middle and fast third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedge.edge.devices import Fleet
from fedge.edge.draws import Array
from fedge.federation import Federation

THIRDS = ("slow third", "middle third", "fast third")


def by_kind(federation: Federation, fleet: Fleet) -> dict[str, Any]:
    """The kinds of a fleet's devices, how many clients have each, and the labels that these hold, [kinds, classes]."""
    if not federation.data.labelled:
        return {}
    devices = fleet.devices(np.arange(federation.clients))
    if len(fleet.kinds) == 1 and devices.flops.min() == devices.flops.max():
        return {}  # all alike
    kinds, kind = (fleet.kinds, devices.kind) if len(fleet.kinds) > 1 else (THIRDS, _thirds(devices.flops))
    counts = federation.label_counts().cpu().numpy()
    labels = [counts[kind == at].sum(0).tolist() for at in range(len(kinds))]
    clients = [int((kind == at).sum()) for at in range(len(kinds))]
    return {"kinds": list(kinds), "clients": clients, "labels": labels}


def _thirds(speed: Array) -> Array:
    order = np.empty(len(speed), np.int64)
    order[speed.argsort(kind="stable")] = np.arange(len(speed))
    found: Array = order * 3 // len(speed)
    return found


def accuracy_by_kind(found: Mapping[str, Any], class_accuracy: Sequence[float | None]) -> dict[str, float | None]:
    """The accuracy on what the clients of each kind hold, by kind; None for a kind without examples."""
    result: dict[str, float | None] = {}
    for kind, labels in zip(found["kinds"], found["labels"], strict=True):
        known = [(n, a) for n, a in zip(labels, class_accuracy, strict=True) if a is not None]
        total = sum(n for n, _ in known)
        result[kind] = sum(n * a for n, a in known) / total if total else None
    return result
