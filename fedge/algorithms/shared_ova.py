"""One-vs-all on one network: a trunk that all classes share and one binary head per class.

FedOVA (Zhu et al., IJCNN 2021) trains one network per class; here the classes share all layers but the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedge import tree
from fedge.algorithms.fedavg import FedAvg, State
from fedge.algorithms.local import ranged
from fedge.algorithms.passes import average
from fedge.core import Batch, Carry, Flow, Loss, Model, Params, Payload, Range, Reply, Task
from fedge.handle import parameters
from fedge.inputs import Inputs, take

HELD = "held"  # the part with one number per class: 1 if the client holds it
OFF = -30.0  # the bias of a head that is switched off: its probability, and so its gradient, vanishes


def one_hot(y: Tensor, classes: int) -> Tensor:
    """[...] -> [..., classes], without a look at the values: an engine may record it."""
    return y.unsqueeze(-1) == torch.arange(classes, device=y.device)


def binary_heads(logits: Tensor, y: Tensor) -> Tensor:
    """sum_i of the cross-entropy of "class i or not", [N]."""
    wanted = one_hot(y, logits.shape[-1]).to(logits)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(-1)


def _switched(params: Params, weight: str, bias: str, held: Tensor) -> Params:
    """The parameters with the heads off where `held` [classes] is 0."""
    off = {weight: params[weight] * held.unsqueeze(-1), bias: params[bias] * held + OFF * (1 - held)}
    return params | off


@dataclass(frozen=True, eq=False)
class SharedOVA(FedAvg):
    """FedAvg with one binary problem per class on one network; a client trains only the heads of its own labels.

        client k minimises  sum over the labels i that it holds of  BCE(z_i(x), y == i)
        trunk:   the mean of the updates, weighted by n_k;    head i: the same over the clients that hold label i
        prediction = argmax_i z_i(x)

    A rule that is no mean (`Robust`) would see zeros from clients that do not hold a label: use FedOVA with it.

    `head` names the layer that gives the scores, by default the last that the module registers. It must be linear, with
    a bias and one output per class, and nothing may follow it. This is checked before the first round. All other fields
    are FedAvg's.

    Bytes per round, d parameters of b bytes, q classes, cohort c: down c d b, up c (d b + q b + 4).
    """

    loss: Loss = binary_heads
    head: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.carry_momentum:
            raise ValueError("carry_momentum mixes heads of clients that hold other labels: leave it off")
        self._head()

    def _head(self) -> tuple[str, str, int]:
        """The names of the head's weight and bias, and its outputs."""
        known = parameters(self.model)
        last = self.head or next(reversed(known)).rpartition(".")[0]
        weight, bias = (f"{last}.{part}" if last else part for part in ("weight", "bias"))
        if weight not in known or bias not in known or known[weight].dim() != 2:
            mine = [name for name in known if name.rpartition(".")[0] == last]
            raise ValueError(
                f"the head {last!r} has {mine or 'no parameters'}, it must be a linear layer with bias: name yours, "
                "such as head='fc2'"
            )
        return weight, bias, len(known[bias])

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        """Also that a head which is switched off gives its bias, and leaves the others alone."""
        super().check(model, params, x, y)
        weight, bias, classes = self._head()
        few = take(x, slice(2))
        before = model.logits(params, few)
        held = (torch.arange(classes, device=before.device) % 2).to(before)
        alone = model.logits(_switched(params, weight, bias, held), few)
        wanted = before * held + OFF * (1 - held) if before.shape[-1:] == held.shape else None
        if wanted is None or not torch.allclose(alone, wanted, rtol=1e-4, atol=1e-4):
            layer = weight.rpartition(".")[0]
            raise ValueError(
                f"the scores are not what the layer {layer!r} gives, one per class: name the one that does, such as "
                "head='fc2'; nothing may follow it"
            )

    def tasks(self, model: Model) -> Mapping[str, Task]:
        weight, bias, classes = self._head()

        def counts(sent: Payload, batch: Batch) -> Params:
            seen = one_hot(batch.y, classes) * batch.mask.unsqueeze(-1)
            return {"labels": seen.sum(0).to(sent["params"][bias])}

        def nothing(sent: Payload) -> Params:
            return {"labels": torch.zeros_like(sent["params"][bias])}

        def own(sent: Payload) -> Params:
            """The parameters with the heads of other labels switched off."""
            held = (sent[HELD]["labels"] > 0).to(sent["params"][bias])
            return _switched(sent["params"], weight, bias, held)

        def upload(sent: Payload, carry: Carry) -> Payload:
            held = (sent[HELD]["labels"] > 0).to(carry["params"][bias])
            delta = tree.sub(carry["params"], own(sent))
            heads = {weight: delta[weight] * held.unsqueeze(-1), bias: delta[bias] * held}
            return {"delta": delta | heads, "holders": {"labels": held}}

        def start(sent: Payload) -> Carry:
            return train["train"].start({**sent, "params": own(sent)})

        train = ranged(self._local().tasks("train", model, upload), Range("holders", 0.0, 1.0, whole=True))
        labels = average(HELD, counts, nothing, keeps=(HELD,), private=True)
        own_heads = replace(train["train"], start=start, contradiction=self._contradiction)
        return {**train, "labels": labels, "train": own_heads}

    def _contradiction(self, upload: Payload) -> str | None:
        """A head that moves without being held: the mean is over the holders, who may weigh next to nothing."""
        weight, bias, _ = self._head()
        others = upload["holders"]["labels"] == 0
        for name in (weight, bias):
            if bool((upload["delta"][name][others].abs() > 0).any()):
                return f"'delta/{name}' moves a head that its client does not hold"
        return None

    def round(self, state: State) -> Flow[State]:
        flow = super().round(state)
        ask: Any = next(flow)
        reply = yield replace(ask, task=("labels", *ask.tasks))
        try:
            flow.send(self._by_head(reply))
        except StopIteration as end:
            found: State = end.value
            return found
        raise AssertionError("FedAvg asks once per round")

    def _by_head(self, reply: Reply) -> Reply:
        """Every head's mean over its own holders; one that nobody held stays."""
        weight, bias, _ = self._head()
        delta, share = reply.mean["delta"], reply.mean["holders"]["labels"]
        times = torch.where(share > 0, 1 / share.clamp(min=1e-12), 0.0)
        heads = {weight: delta[weight] * times.unsqueeze(-1), bias: delta[bias] * times}
        return replace(reply, mean={**reply.mean, "delta": delta | heads})
