"""What a method asks of a client per round, in gradients of single examples."""

from __future__ import annotations

from typing import Any

import fedge
from fedge.algorithms.local_newton import LocalNewton
from fedge.core import Algorithm

PRODUCT = 2  # a curvature matrix times a vector: one pass forward with the vector, one backward


def passes(algorithm: Algorithm[Any]) -> int:
    """Passes over all of a client's examples per round.

    A gradient counts one, a product with a curvature matrix two, a forward-mode pass or a loss one: rather too much
    than too little for the methods that need them.
    """
    if isinstance(algorithm, fedge.FedOVA):
        return passes(algorithm.inner)
    if isinstance(algorithm, LocalNewton):
        if isinstance(algorithm, fedge.DONE) and algorithm.batch_size is not None:
            raise ValueError(f"batch_size is {algorithm.batch_size}: products over batches are not counted yet")
        return 1 + PRODUCT * algorithm.iterations + len(algorithm.candidates)
    if isinstance(algorithm, fedge.FisherLBFGS):
        return _lbfgs(algorithm)
    if isinstance(algorithm, fedge.SubspaceNewton):
        return algorithm.epochs + (1 + algorithm.memory) + (1 + len(algorithm.dampings))
    epochs: int = algorithm.epochs  # type: ignore[attr-defined]
    return epochs + (1 if isinstance(algorithm, fedge.FedDANE | fedge.FOOF) else 0)


def _lbfgs(algorithm: fedge.FisherLBFGS) -> int:
    """Local epochs or one gradient, the diagonal or a product, and losses."""
    first = algorithm.epochs if algorithm.source == "update" else 1
    curvature = PRODUCT if algorithm.curvature == "product" else 1
    return first + curvature + len(algorithm.candidates) + len(algorithm.dampings)
