"""The peer of workloads B and C: FedAvg of a 64-32-10 MLP as one hand-written JAX program (vmap, scan, jit).

    python jax_peer.py FILE    the workload is in FILE (.npz); rounds per line in, CPU seconds per round out

Needs JAX alone. The whole round is one compiled call: clients by vmap, local steps by scan, orders drawn on the device,
and the weighted mean. It checks no upload and counts no bytes. `benchmarks.speed.peers` starts it.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import jax  # type: ignore[import-not-found, unused-ignore]
import jax.numpy as jnp  # type: ignore[import-not-found, unused-ignore]
import numpy as np


def logits(params: Any, x: Any) -> Any:
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params: Any, x: Any, y: Any, mask: Any) -> Any:
    each = jax.nn.logsumexp(z := logits(params, x), axis=-1) - jnp.take_along_axis(z, y[:, None], 1)[:, 0]
    return (each * mask).sum() / jnp.maximum(mask.sum(), 1)


def client(params: Any, x: Any, y: Any, mine: Any, size: Any, key: Any, epochs: int, batch: int, lr: float) -> Any:
    """E epochs of SGD on one client; `mine` [P] are its examples, padded behind `size` of them."""
    room = -(-len(mine) // batch) * batch
    place = jnp.arange(room)

    def epoch(params: Any, key: Any) -> Any:
        draws = jnp.where(place < size, jax.random.uniform(key, (room,)), jnp.inf)
        order = jnp.argsort(draws)
        chosen = jnp.take(mine, order, mode="clip").reshape(-1, batch)
        real = (place < size).astype(x.dtype).reshape(-1, batch)

        def step(params: Any, one: Any) -> Any:
            index, mask = one
            grad = jax.grad(loss)(params, x[index], y[index], mask)
            return jax.tree.map(lambda p, g: p - lr * g, params, grad), None

        return jax.lax.scan(step, params, (chosen, real))[0], None

    return jax.lax.scan(epoch, params, jax.random.split(key, epochs))[0]


@partial(jax.jit, static_argnames=("epochs", "batch", "lr"))
def one_round(params: Any, x: Any, y: Any, index: Any, sizes: Any, cohort: Any, key: Any, epochs: int, batch: int, lr: float) -> Any:  # fmt: skip # noqa: E501
    keys, mine, size = jax.random.split(key, len(cohort)), index[cohort], sizes[cohort]
    work = partial(client, epochs=epochs, batch=batch, lr=lr)
    found = jax.vmap(work, in_axes=(None, None, None, 0, 0, 0))(params, x, y, mine, size, keys)
    weight = size / size.sum()
    return jax.tree.map(lambda leaf: jnp.tensordot(weight, leaf, 1), found)


def main(file: str) -> None:
    given = np.load(file)
    x, y, index, sizes = (jnp.asarray(given[name]) for name in ("x", "y", "index", "sizes"))
    params = {name: jnp.asarray(given[name]) for name in ("w1", "b1", "w2", "b2")}
    epochs, batch, lr, cohort = int(given["epochs"]), int(given["batch"]), float(given["lr"]), int(given["cohort"])
    rng, key = np.random.default_rng(0), jax.random.key(0)
    for line in sys.stdin:
        rounds = int(line)
        begin = time.process_time()
        for number in range(rounds):
            drawn = rng.choice(len(sizes), cohort, replace=False)
            address = jax.random.fold_in(key, number)
            params = one_round(params, x, y, index, sizes, drawn, address, epochs=epochs, batch=batch, lr=lr)
        jax.block_until_ready(params)
        print((time.process_time() - begin) / rounds, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
