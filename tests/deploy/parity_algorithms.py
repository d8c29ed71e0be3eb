"""The algorithms of the parity test, in float64, and the federation they train on; used on both sides of the fleet."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import fedge
from fedge.core import Algorithm

EVERYTHING = "FEDGE_ALL_CASES"  # environment
CLIENTS, ROUNDS, COHORT, SEED = 10, 3, 6, 5


def federation() -> fedge.Federation:
    data = fedge.data.load("digits")
    wide = fedge.data.Data(data.train_x.double(), data.train_y, data.test_x.double(), data.test_y, data.classes)
    return fedge.Federation(wide, fedge.partition.labels_per_client(data.train_y, CLIENTS, labels=2, seed=0))


def _inner(outputs: int) -> dict[str, Callable[[], Algorithm]]:
    def model():
        return fedge.models.mlp(64, (8,), outputs, seed=1).double()

    options = {"epochs": 1, "batch_size": 20}
    product = {"curvature": "product", "source": "gradient", "matrix": "gauss_newton", "damping": 0.1}
    return {
        "FedAvg": lambda: fedge.FedAvg(model(), lr=0.1, **options),
        "SCAFFOLD": lambda: fedge.SCAFFOLD(model(), lr=0.05, **options),
        "FedDANE": lambda: fedge.FedDANE(model(), lr=0.05, mu=0.1, **options),
        "Fisher diagonal": lambda: fedge.FisherLBFGS(model(), memory=2, **options),
        "Fisher product": lambda: fedge.FisherLBFGS(model(), memory=2, **product, **options),
        "Subspace": lambda: fedge.SubspaceNewton(model(), lr=0.1, **options),
        "GIANT": lambda: fedge.GIANT(model(), iterations=3),
    }


def algorithms() -> dict[str, Algorithm]:
    plain = {name: make() for name, make in _inner(10).items()}
    ova = {f"FedOVA over {name}": fedge.FedOVA(make(), classes=10) for name, make in _inner(2).items()}
    plain["FedPer"] = fedge.FedPer(fedge.models.mlp(64, (8,), 10, seed=1).double(), epochs=1, batch_size=20)
    shared = {"Data sharing": fedge.DataSharing(_inner(10)["FedDANE"](), beta=0.1)}
    return plain | ova | shared | _contract() | (_rest() if os.environ.get(EVERYTHING) else {})


def _rest() -> dict[str, Algorithm]:
    """What takes the same ways as the others; for `make test-all` alone."""
    options = {"epochs": 1, "batch_size": 20}

    def model():
        return fedge.models.mlp(64, (8,), 10, seed=1).double()

    plain = _inner(10)["FedAvg"]
    rules = {"median": fedge.Median(), "trimmed": fedge.TrimmedMean(0.2), "gathered": fedge.Mean()}
    codecs = {"8 bits": fedge.Quantise(8), "2 bits": fedge.Quantise(2), "cast": fedge.Cast()}
    return {
        "DONE": fedge.DONE(model(), iterations=3),
        "FedProx": fedge.FedProx(model(), lr=0.1, mu=0.1, **options),
        "FOOF": fedge.FOOF(model(), lr=0.1, **options),
        "FedNova": fedge.FedNova(model(), lr=0.1, momentum=0.5, **options),
        "FedCM": fedge.FedCM(model(), lr=0.1, **options),
        "Spectral": fedge.FedAvg(
            model(), lr=0.01, optimiser="spectral", carry_momentum=True, inner_decay=0.2, **options
        ),
        "Server spectral": fedge.FedAvg(model(), server_optimiser="spectral", server_momentum=0.5, **options),
        "Averaged": fedge.Averaged(plain(), window=2),
        **{f"Robust, {name}": fedge.Robust(plain(), rule) for name, rule in rules.items()},
        **{f"Compressed, {name}": fedge.Compressed(plain(), codec) for name, codec in codecs.items()},
        "Robust around compressed SCAFFOLD": fedge.Robust(
            fedge.Compressed(replace(_inner(10)["SCAFFOLD"](), control="average"), fedge.TopK(0.1)), fedge.Median()
        ),
    }


def _contract() -> dict[str, Algorithm]:
    """Rules that need all uploads, codecs, and what devices remember from round to round."""
    plain, binary = _inner(10)["FedAvg"], _inner(2)["FedAvg"]
    return {
        "Robust, Krum": fedge.Robust(plain(), fedge.Krum(1, 3)),
        "Robust, clipped": fedge.Robust(_inner(10)["FedDANE"](), fedge.ClippedMean(0.5)),
        "Compressed, top": fedge.Compressed(plain(), fedge.TopK(0.05)),
        "FedOVA over compressed": fedge.FedOVA(fedge.Compressed(binary(), fedge.Quantise(4)), classes=10),
    }
