"""Theorem 3: bytes per round from the ledger, star and tree, total and longest path, for FedAvg and FisherLBFGS.

star   every client has its own copy sent and sends its own upload; all of them pass the server's link, one after
       another, so the longest path is the total
tree   a binomial tree with the server at its root: who has the payload hands it on, and the uploads are added up on
       the way back; as many messages as in the star, but only ceil(log2(tau + 1)) of them one after another
"""

from __future__ import annotations

from typing import Any

import torch

import fedge
from fedge.core import Algorithm

from .pictures import draw_bytes
from .store import save, save_picture

TAUS = (10, 100, 1000, 10_000)
MEMORY = 10
SCALAR = 4  # bytes: float32
INPUTS, CLASSES = 64, 10
PARAMETERS = INPUTS * CLASSES + CLASSES


def algorithms() -> dict[str, Algorithm[Any]]:
    model = fedge.models.logistic(INPUTS, CLASSES, seed=0)
    product: dict[str, Any] = {"source": "gradient", "curvature": "product", "memory": MEMORY}
    return {
        "FedAvg": fedge.FedAvg(model, epochs=1),
        "FisherLBFGS, diagonal": fedge.FisherLBFGS(model, epochs=1, memory=MEMORY),
        "FisherLBFGS, product": fedge.FisherLBFGS(model, **product),
        "FisherLBFGS, product at next": fedge.FisherLBFGS(model, **product, curvature_at="next"),
    }


def formula(name: str) -> tuple[int, int]:
    """(down, up) bytes of one client in one round, as in the algorithms' docstrings; an upload's weight has 4."""
    vector = PARAMETERS * SCALAR
    return {
        "FedAvg": (vector, vector + 4),
        "FisherLBFGS, diagonal": (vector, 2 * vector + 8),
        "FisherLBFGS, product": (2 * vector, 2 * (vector + 4)),
        "FisherLBFGS, product at next": (2 * vector, 2 * (vector + 4)),
    }[name]


def synthetic(clients: int) -> fedge.Federation:
    """Two random examples a client: bytes do not depend on what is learnt."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * clients, INPUTS, generator=draw)
    y = torch.arange(2 * clients) % CLASSES
    data = fedge.data.Data(x, y, x[:CLASSES], y[:CLASSES], CLASSES)
    return fedge.Federation(data, [[2 * k, 2 * k + 1] for k in range(clients)])


def from_the_ledger(algorithm: Algorithm[Any], tau: int) -> dict[str, int]:
    """What the second round moved (the first has no product yet at "next")."""
    run = fedge.train(algorithm, synthetic(tau), rounds=2, observe=fedge.Observe(evaluate_every=2))
    return run.ledger.total(round=2)


def binomial_tree(tau: int) -> list[tuple[int, int, int]]:
    """(step, from, to) of a broadcast from node 0 to tau others: in every step all who have it hand it on once."""
    messages, holders, step = [], 1, 0
    while holders <= tau:
        step += 1
        fresh = min(holders, tau + 1 - holders)
        messages += [(step, node, holders + node) for node in range(fresh)]
        holders += fresh
    return messages


def row(name: str, algorithm: Algorithm[Any], tau: int) -> dict[str, Any]:
    """Measured on the star; the tree moves the same two payloads over its own messages, down and back up."""
    moved, (down, up) = from_the_ledger(algorithm, tau), formula(name)
    tree = binomial_tree(tau)
    return {
        "algorithm": name,
        "tau": tau,
        "ledger": moved["down"] + moved["up"],
        "star_total": tau * (down + up),
        "star_path": tau * (down + up),
        "star_path_broadcast": down + tau * up,
        "tree_total": len(tree) * (down + up),
        "tree_path": tree[-1][0] * (down + up),
        "tree_hops": tree[-1][0],
    }


def measure(taus: tuple[int, ...] = TAUS) -> list[dict[str, Any]]:
    return [row(name, algorithm, tau) for name, algorithm in algorithms().items() for tau in taus]


def main() -> None:
    config = {"parameters": PARAMETERS, "bytes_a_scalar": SCALAR, "memory": MEMORY, "model": "logistic(64, 10)"}
    config["dot_products"] = 8 * (2 * MEMORY + 1) ** 2
    result = {"config": config, "rows": measure()}
    save("bytes", result)
    save_picture("bytes", draw_bytes(result))
