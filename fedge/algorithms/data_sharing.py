"""Data sharing: Zhao et al., Federated Learning with Non-IID Data, 2018."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedge import inputs, keys, tree
from fedge.algorithms.wrapper import Wrapper, chain
from fedge.checks import at_least_zero, choice, positive
from fedge.core import Algorithm, Batch, Examples, Flow, Params, Share
from fedge.handle import Handle, parameters

WARM_UP_BATCH = 15


@dataclass(frozen=True, eq=False)
class DataSharing(Wrapper[Any]):
    """Any algorithm, whose clients all get the same few examples of the global pool before the first round.

    In the paper beta = |D_shared| / |D_k| (Sec. VI-C): round(beta * mean n_k) examples, drawn once, are sent to every
    client. From then on they are part of its data, and its weight counts them. Which rows a client works on (FedOVA)
    still follows from its own labels.

    As Zhao et al. (2018, Sec. 4) define it, of="all", balanced=True, portion=alpha and warm_up > 0:

        G: beta * sum_k n_k examples of the pool, as many of each class; every client is sent its own alpha |G| of them
        w_0: `warm_up` epochs of SGD over G by the server, batches of 15, with step `warm_up_lr` or the clients' own

    Their G is separate from the clients' data. Ours is drawn from the same pool, so clients may hold examples of it.

    Bytes: those of the inner algorithm and, once, K times the shared examples that a client gets, down.
    """

    inner: Algorithm[Any]
    beta: float = 0.1
    of: Literal["client", "all"] = "client"
    balanced: bool = False
    portion: float = 1.0
    warm_up: int = 0
    warm_up_lr: float | None = None

    def __post_init__(self) -> None:
        for name in ("beta", "portion"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 1:
                raise ValueError(f"{name} is {value!r}, it must be greater than 0 and at most 1")
        choice("of", self.of, ("client", "all"))
        positive("warm_up_lr", self.warm_up_lr, optional=True)
        at_least_zero("warm_up", self.warm_up)
        self._check_inner()

    def _check_inner(self) -> None:
        inside = list(chain(self.inner))
        if any(isinstance(one, DataSharing) for one in inside):
            raise ValueError("data is shared once: add up the two betas instead of nesting DataSharing")
        if self.inner.privacy() is not None:
            raise ValueError("data sharing sends examples to everybody: nothing that Private promises would hold")
        if self.warm_up and any(hasattr(one, "inner_outputs") for one in inside):
            raise ValueError(f"warm_up is {self.warm_up}, but FedOVA has one model per class: set it to 0")
        if self.warm_up and self._step_size() is None:
            raise ValueError(f"{type(inside[-1]).__name__} has no local steps: say with which warm_up_lr to warm up")

    def _step_size(self) -> float | None:
        """The size of a warm-up step: as given, or that of the clients' local steps."""
        last = list(chain(self.inner))[-1]
        local = getattr(last, "local_lr", getattr(last, "lr", None) if hasattr(last, "epochs") else None)
        lr: float | None = self.warm_up_lr or local
        return lr

    def setup(self, state: Any) -> Flow[Any]:
        shared: Examples = yield Share(self.beta, self.of, self.balanced, self.portion)
        if self.warm_up:
            state = self.inner.init(self._warmed(shared))
        return (yield from self.inner.setup(state))

    def _warmed(self, shared: Examples) -> Params:
        """w_0: the module's weights after SGD over G; the server has G, so that nothing is sent."""
        device, lr = shared.y.device, self._step_size()
        assert lr is not None
        handle = Handle(self.model, self.loss, device)
        params = {name: leaf.to(device) for name, leaf in parameters(self.model).items()}
        for epoch in range(self.warm_up):
            key = keys.fold(shared.key, epoch)
            order = keys.fold_tensor(key, torch.arange(len(shared.y))).argsort(stable=True).to(device)
            for step, rows in enumerate(order.split(WARM_UP_BATCH)):
                at = torch.tensor(keys.fold(key, keys.STEP, step), device=device)
                mask = torch.ones(len(rows), dtype=torch.bool, device=device)
                batch = Batch(inputs.take(shared.x, rows), shared.y[rows], mask, at)
                params = tree.axpy(-lr, handle.grad(params, batch), params)
        return params
