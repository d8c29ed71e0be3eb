"""FedPer: Arivazhagan, Aggarwal, Singh and Choudhary, Federated Learning with Personalization Layers, 2019."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fedge import tree
from fedge.algorithms import schedule
from fedge.algorithms.local import LocalTraining, check_settings
from fedge.algorithms.optimisers import SGD
from fedge.checks import nearest
from fedge.combine import Gather
from fedge.core import Algorithm, Ask, Batch, Carry, Flow, Loss, Model, Params, Payload, Range, Task, filled
from fedge.handle import by_target, parameters
from fedge.inputs import Inputs

State = dict[str, Any]
PERSONAL = "personal"  # what a client remembers


@dataclass(frozen=True, eq=False)
class FedPer(Algorithm[State]):
    """FedAvg on the shared layers s of a network; every client has personal layers p_k of its own (Alg. 1 and 2).

        (s_k, p_k) <- E epochs of local SGD with momentum on F_k(s, p),  from s_t and its own p_k
        s_{t+1}    =  s_t + server_lr * sum_k n_k (s_k - s_t) / sum_k n_k

    `personal` names parameters or the modules they are in ("fc2" is "fc2.weight" and "fc2.bias"); by default the last
    layer. A client remembers its personal layers, at first those of the module. They are never sent.

    What counts is how good the model is for each client. Before a client trains, it measures the accuracy of s_t with
    its own p_k on its own examples, which it has trained on in earlier rounds. The record has the mean over the cohort
    as `client_accuracy_mean` and the mean of its lowest tenth, at least one client, as `client_accuracy_worst_decile`.

    The server has no personal layers: `params` are the shared layers with the module's first personal ones. The scores
    on the test set use these, so the test accuracy says little. `lr_decay`, `inner_decay`, `clip` are as in FedAvg.

    Bytes per round, s shared parameters of b bytes, cohort c: down c s b, up c (s b + b + 8); with lr_decay < 1 also
    down c b. A client remembers its personal layers.
    """

    model: nn.Module
    personal: tuple[str, ...] = ()
    lr: float = 0.1
    lr_decay: float = 1.0
    inner_decay: float = 1.0
    epochs: int = 5
    batch_size: int | None = 15
    momentum: float = 0.0
    weight_decay: float = 0.0
    server_lr: float = 1.0
    clip: float | None = None
    loss: Loss = by_target

    def __post_init__(self) -> None:
        check_settings(self)
        if isinstance(self.personal, str):
            raise ValueError(f"personal is {self.personal!r}, it must be a list of names: [{self.personal!r}]")
        names = list(parameters(self.model))
        for one in self.personal:
            if not any(_is_in(name, one) for name in names):
                known = {*names, *map(_module, names)} - {""}
                raise ValueError(f"personal has {one!r}{nearest(one, known)}, which is none of the model's {names}")
        if self._personal_names() == set(names):
            raise ValueError(f"all of {names} are personal, none are left to share: set personal to fewer")

    def _personal_names(self) -> set[str]:
        names = [name for name, leaf in self.model.named_parameters() if leaf.requires_grad]
        wanted = self.personal or (_module(names[-1]),)
        return {name for name in names if any(_is_in(name, one) for one in wanted)}

    def tasks(self, model: Model) -> Mapping[str, Task]:
        first = parameters(self.model)
        names = self._personal_names()

        def begin(sent: Payload) -> Payload:
            like = next(iter(sent["params"].values()))
            return {PERSONAL: {name: first[name].to(like.device, like.dtype) for name in first if name in names}}

        def whole(sent: Payload) -> Params:
            """All parameters, in the module's order."""
            both = sent["params"] | sent[PERSONAL]
            return {name: both[name] for name in first}

        def upload(sent: Payload, carry: Carry) -> Payload:
            delta = {name: carry["params"][name] - leaf for name, leaf in sent["params"].items()}
            return {"delta": delta, PERSONAL: {name: carry["params"][name] for name in sent[PERSONAL]}}

        def start(sent: Payload) -> Carry:
            return tasks["train"].start({**sent, "params": whole(sent)})

        tasks = self._local().tasks("train", model, upload)
        work = {"train": replace(tasks["train"], start=start), "judge": self._judge(model, whole)}
        own = {name: replace(task, remembers=(PERSONAL,), first=begin) for name, task in work.items()}
        return {**tasks, **own}

    def _judge(self, model: Model, whole: Callable[[Payload], Params]) -> Task:
        """The share of its own examples that a client classifies rightly with what it was sent."""

        def start(sent: Payload) -> Carry:
            return next(iter(sent["params"].values())).new_zeros(())

        def step(sent: Payload, carry: Carry, batch: Batch) -> Carry:
            right = model.logits(whole(sent), batch.x).argmax(-1) == batch.y
            return carry + (right & batch.mask).sum()

        def finish(sent: Payload, carry: Carry, examples: Tensor) -> tuple[Payload, Tensor]:
            return {"accuracy": {"own": carry / examples}, PERSONAL: sent[PERSONAL]}, examples.float()

        return Task(start, step, finish, batch_size=self.batch_size, ranges=(Range("accuracy", 0.0, 1.0),))

    def _local(self) -> LocalTraining:
        rule = SGD(self.momentum, self.weight_decay)
        return LocalTraining(rule, self.lr, self.epochs, self.batch_size, self.clip, self.inner_decay)

    def init(self, params: Params) -> State:
        return {"params": params, "served": None, **schedule.begin(self.lr_decay)}

    def adopt(self, state: State) -> State:
        return {"served": None} | schedule.begin(self.lr_decay) | state

    def round(self, state: State) -> Flow[State]:
        names = self._personal_names()
        shared = {name: leaf for name, leaf in state["params"].items() if name not in names}
        judge = Ask("judge", {"params": shared}, combine=Gather())
        train = Ask(self._local().asked("train"), schedule.part(self.lr_decay, state), reuse=("params",))
        judged, trained = yield judge, train
        params = state["params"] | tree.axpy(self.server_lr, trained.mean["delta"], shared)
        served = _served(judged.uploads.parts["accuracy"]["own"])
        return {"params": params, "served": served, **schedule.after(self.lr_decay, state)}

    def network(self, state: State, memory: Payload | None = None) -> nn.Module:
        """With the personal layers that a client remembers, else with the module's first ones."""
        return filled(self.model, state["params"] | (memory or {}).get(PERSONAL, {}))

    def notes(self, state: State) -> dict[str, Any]:
        return {f"client_accuracy_{name}": value for name, value in (state["served"] or {}).items()}

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        if y.is_floating_point() or y.dim() > 1:
            kind = y.dtype if y.is_floating_point() else "several per example"
            raise ValueError(f"the labels are {kind}, but FedPer records the accuracy of clients: give class numbers")
        super().check(model, params, x, y)


def _module(name: str) -> str:
    """The name of the module that a parameter is in."""
    return name.rpartition(".")[0]


def _is_in(name: str, place: str) -> bool:
    """Whether a parameter is this one, or within this module; "" is the whole model."""
    return name == place or f".{name}".startswith(f".{place}." if place else ".")


def _served(accuracies: Tensor) -> dict[str, float]:
    """How well the clients of a cohort are served: all of them, and the lowest tenth."""
    lowest = accuracies.double().sort().values
    worst = lowest[: max(1, len(lowest) // 10)]
    return {"mean": float(lowest.mean()), "worst_decile": float(worst.mean())}
