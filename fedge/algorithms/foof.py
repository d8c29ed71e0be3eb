"""FOOF: Benzing, Gradient Descent on Neurons and its Link to Approximate Second-Order Optimization, ICML 2022.

There it is an optimiser of one machine. Here every client has a preconditioner of its own, from its own examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedge import tree
from fedge.algorithms.fedavg import FedAvg
from fedge.algorithms.optimisers import SGD
from fedge.checks import at_least_one, positive
from fedge.core import Batch, Carry, Model, Params, Payload, Task
from fedge.handle.layer_inputs import sides
from fedge.inputs import Inputs, take

PART = "inputs"  # the task, and the part that it leaves with the client


@dataclass(frozen=True, eq=False)
class FOOF(FedAvg):
    """FedAvg whose local steps are preconditioned by the second moments of every layer's inputs.

    A layer has the weight W, the bias b and the input a, with a 1 below it (of a convolution: a patch). Client k takes

        A = mean of a a^T over its examples at w_t,     c = trace A / dim A
        P = (1 + damping) (A / c + damping I)^(-1)

    once per round, in one forward pass, and keeps it. Its local steps then are  [W b] <- [W b] - lr [dW db] P.

    Why: the Gauss-Newton and the Fisher matrix of a layer are nearly a Kronecker product of A and of a matrix of its
    outputs. P inverts the former: what comes with every input, such as a mean, moves less, and what few inputs have
    moves more. An input direction of mean power moves as in FedAvg; with a large damping all do. The strongest
    directions bound FedAvg's steps and are weakened here, so the step size may be a few times as large.

    Preconditioned are linear layers and convolutions without groups that are used once and have at most `largest_side`
    inputs, the 1 included; a weight's bias is the parameter of the same name with "bias". The rest moves as in FedAvg.
    The clients' optimiser is SGD; all other fields are those of FedAvg. Clients with unequal inputs have unequal P, so
    that a minimum of the mean loss is no fixed point, even with one local step.

    Cost per client and round: one pass forward, and per layer with i inputs, o outputs an inverse, i^3 operations, and
    per local step 2 o i^2. A client keeps i^2 numbers per layer during the round.

    Bytes per round: those of FedAvg; d parameters of b bytes, cohort c: down c d b, up c (d b + 4).
    """

    lr: float = 0.3
    damping: float = 1.0
    largest_side: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("damping", self.damping)
        at_least_one("largest_side", self.largest_side)
        if not isinstance(self._rule(), SGD):
            raise ValueError(
                f"optimiser is {self.optimiser!r}, but FOOF preconditions the steps of SGD: leave it at 'sgd', or use "
                "FedAvg for other local optimisers"
            )

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        super().check(model, params, x, y)
        ones = torch.ones(1, dtype=torch.bool, device=y.device)
        batch = Batch(take(x, slice(1)), y[:1], ones, torch.zeros((), dtype=torch.long, device=y.device))
        found = model.sum_inputs(params, batch, self.largest_side)
        if not any(bool(leaf.any()) for leaf in found.values()):
            raise ValueError(
                "no layer can be preconditioned: none is a linear layer, or a convolution without groups, that is used "
                f"once and has fewer than {self.largest_side} inputs: raise largest_side, or use FedAvg"
            )

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def start(sent: Payload) -> Carry:
            params = sent["params"]
            like = next(iter(params.values()))
            return {name: like.new_zeros(side, side) for name, side in sides(params, self.largest_side).items()}

        def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
            return tree.add(carry, model.sum_inputs(sent["params"], batch, self.largest_side))

        def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
            own = {name: _own(name, moments, sent["params"]) for name, moments in carry.items()}
            return {PART: {name: self._inverse(moments) for name, moments in own.items()}}, examples.float()

        seen = Task(start, step, finish, batch_size=self.batch_size, keeps=(PART,), private=True)
        return {PART: seen, **super().tasks(model)}

    def _asked(self) -> tuple[str, ...]:
        return (PART, *super()._asked())

    def _inverse(self, moments: Tensor) -> Tensor:
        """P; the identity where nothing was seen."""
        one = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        mean = moments.diagonal().mean()
        seen = mean > 0
        scaled = moments / torch.where(seen, mean, 1.0) + self.damping * one
        root, _ = torch.linalg.cholesky_ex(scaled)  # of inputs that are not finite the result is not, and is dropped
        return torch.where(seen, (1 + self.damping) * torch.cholesky_inverse(root), one)

    def _bend(self, sent: Payload, held: Params, params: Params, grad: Params) -> Params:
        found = dict(grad)
        for name, inverse in sent[PART].items():
            bias = _bias(name, params)
            columns = [grad[name].flatten(1), *([] if bias is None else [grad[bias].unsqueeze(1)])]
            bent = torch.cat(columns, 1) @ inverse
            found[name] = (bent if bias is None else bent[:, :-1]).reshape(grad[name].shape)
            if bias is not None:
                found[bias] = bent[:, -1]
        return found


def _bias(weight: str, params: Params) -> str | None:
    """The bias of a weight "....weight", if there is one."""
    bias = weight.removesuffix("weight") + "bias"
    return bias if bias != weight and bias in params and params[bias].ndim == 1 else None


def _own(weight: str, moments: Tensor, params: Params) -> Tensor:
    """Of the inputs and the 1, or of the inputs alone where there is no bias."""
    return moments if _bias(weight, params) is not None else moments[:-1, :-1]
