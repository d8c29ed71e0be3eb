"""Scores made comparable: a ridge regression on the scores of all classes, solved by the server.

Ten binary models that were trained apart are not calibrated against each other. Least squares needs nothing from a
client but means of products of its scores (and Hastie, Tibshirani and Friedman, The Elements of Statistical Learning,
Sec. 4.2, for classification by it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedge import tree
from fedge.algorithms.fedova import FedOVA
from fedge.algorithms.passes import average
from fedge.algorithms.shared_ova import one_hot
from fedge.algorithms.wrapper import Wrapper, chain
from fedge.checks import at_least_one, positive
from fedge.core import Algorithm, Ask, Batch, Flow, Model, Params, Payload, Range, Task
from fedge.inputs import Inputs, take

State = dict[str, Any]
TASK, PART = "moments", "moments"
SCALE = 4.0  # of a score, in units of log-odds


@dataclass(frozen=True, eq=False)
class Calibrated(Wrapper[State]):
    """The inner algorithm and, after every `every` rounds, one linear layer on its scores.

        phi(x) = (tanh(score_1(x) / 4), ..., tanh(score_q(x) / 4), 1)
        clients send       A = sum_k n_k E_k[phi phi^T] / n,   B = sum_k n_k E_k[phi onehot(y)^T] / n
        the server solves  (A + ridge I) W = B;   prediction = argmax of phi(x)^T W

    In the rounds between, the inner algorithm's own scores are used; training is untouched. `cohorts` is how many new
    cohorts are asked, one after another: with few examples per client one is not enough. Around FedOVA they are sent
    the models of all classes, whichever they hold. `classes`, q, is FedOVA's, or the number of outputs of the last
    layer; give it if another layer gives the scores.

    Bytes of such a round, beside the inner algorithm's, per cohort: down c times all its parameters, up c times
    ((q + 1) (q + 2) / 2 + (q + 1) q) numbers and the weight: 176 numbers for ten classes.
    """

    inner: Algorithm[Any]
    every: int = 20
    cohorts: int = 1
    ridge: float = 0.01
    classes: int | None = None

    def __post_init__(self) -> None:
        at_least_one("every", self.every)
        at_least_one("cohorts", self.cohorts)
        positive("ridge", self.ridge)
        at_least_one("classes", self.classes, optional=True)
        if any(isinstance(one, Calibrated) for one in chain(self.inner)):
            raise ValueError("scores are calibrated once: leave out one of the two Calibrated")
        if self.inner.privacy() is not None:
            raise ValueError("what calibration asks of clients has no noise: nothing that Private promises would hold")

    @property
    def _ova(self) -> FedOVA | None:
        return next((one for one in chain(self.inner) if isinstance(one, FedOVA)), None)

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def total(sent: Payload, batch: Batch) -> Params:
            phi = features(self._at(model, sent["params"], batch.x)) * batch.mask.unsqueeze(-1)
            wanted = one_hot(batch.y, phi.shape[-1] - 1).to(phi)
            rows, columns = torch.triu_indices(phi.shape[-1], phi.shape[-1], device=phi.device)
            return {"second": (phi.T @ phi)[rows, columns], "first": phi.T @ wanted}

        def nothing(sent: Payload) -> Params:
            q = self._classes(sent["params"])
            like = next(iter(sent["params"].values()))
            return {"second": like.new_zeros((q + 1) * (q + 2) // 2), "first": like.new_zeros(q + 1, q)}

        about: dict[str, Any] = {"ranges": (Range(PART, -1.0, 1.0),), "contradiction": _contradiction}
        return {**self.inner.tasks(model), TASK: average(PART, total, nothing, **about)}

    def _at(self, model: Model, params: Params, x: Tensor) -> Tensor:
        """The scores of all classes at parameters that were sent."""
        if self._ova is None:
            return model.logits(params, x)
        logits = [model.logits(tree.take(params, row), x) for row in range(self._ova.classes)]
        return torch.stack([two[..., 1] - two[..., 0] for two in logits], -1)

    def _classes(self, params: Params) -> int:
        """q: FedOVA's, as given, or that of the last layer, whose bias [q] or weight [q, ...] is the last leaf."""
        if self._ova is not None:
            return self._ova.classes
        return self.classes or len(next(reversed(params.values())))

    def check(self, model: Model, params: Params, x: Inputs, y: Tensor) -> None:
        """Also that there are as many scores as the clients will send products of."""
        super().check(model, params, x, y)
        found, wanted = 0, self._classes(params)
        if self._ova is None:
            found = model.logits(params, take(x, slice(1))).shape[-1]
        if found not in (0, wanted):
            said = "classes is" if self.classes else "the last layer that the model registers has"
            raise ValueError(f"{said} {wanted}, but the model gives {found} scores: set classes={found}")

    def init(self, params: Params) -> State:
        return self._begin(self.inner.init(params))

    def _begin(self, inner: Any) -> State:
        return {"inner": inner, "round": 0, "layer": None}

    def setup(self, state: State) -> Flow[State]:
        return {**state, "inner": (yield from self.inner.setup(state["inner"]))}

    def round(self, state: State) -> Flow[State]:
        inner = yield from self.inner.round(state["inner"])
        t, layer = state["round"] + 1, None
        if t % self.every == 0:
            layer = yield from self._solve(self.inner.params(inner))
        return {"inner": inner, "round": t, "layer": layer}

    def _solve(self, params: Params) -> Flow[Tensor]:
        """The layer, from the mean of the cohorts' moments."""
        found = []
        for _ in range(self.cohorts):
            reply = yield Ask(TASK, {"params": params}, cohort="new")
            found.append(reply.mean[PART])
        return solved({name: torch.stack([one[name] for one in found]).mean(0) for name in found[0]}, self.ridge)

    def adopt(self, state: Any) -> State:
        """Also a run of the inner algorithm alone; a layer fits the models it was solved for, so it is dropped."""
        if not (isinstance(state, dict) and "layer" in state):
            return self._begin(self.inner.adopt(state))
        return {**state, "inner": self.inner.adopt(state["inner"]), "layer": None}

    def notes(self, state: State) -> dict[str, Any]:
        return self.inner.notes(state["inner"])

    def params(self, state: State) -> Params:
        return self.inner.params(state["inner"])

    def with_params(self, state: State, params: Params) -> State:
        return {**state, "inner": self.inner.with_params(state["inner"], params)}

    def scores(self, model: Model, state: State, x: Tensor) -> Tensor:
        found = self.inner.scores(model, state["inner"], x)
        return found if state["layer"] is None else features(found) @ state["layer"]

    def network(self, state: State, memory: Payload | None = None) -> nn.Module:
        inner = self.inner.network(state["inner"], memory)
        if state["layer"] is None:
            return inner
        weight = state["layer"].detach().cpu()
        layer = nn.Linear(len(weight) - 1, weight.shape[1]).to(weight)
        with torch.no_grad():
            layer.weight.copy_(weight[:-1].T)
            layer.bias.copy_(weight[-1])
        return nn.Sequential(inner, Bounded(), layer).eval()


class Bounded(nn.Module):
    """tanh of the scores, scaled."""

    def forward(self, scores: Tensor) -> Tensor:
        return torch.tanh(scores / SCALE)


def features(scores: Tensor) -> Tensor:
    """phi: the scores, bounded, and 1."""
    return torch.cat([torch.tanh(scores / SCALE), torch.ones_like(scores[..., :1])], -1)


def matrix_of(moments: Params) -> Tensor:
    """A [q + 1, q + 1] of the numbers on and above its diagonal, in double precision."""
    size = len(moments["first"])
    matrix = moments["second"].new_zeros(size, size, dtype=torch.float64)
    rows, columns = torch.triu_indices(size, size, device=matrix.device)
    matrix[rows, columns] = moments["second"].double()
    matrix[columns, rows] = moments["second"].double()
    return matrix


def _contradiction(upload: Payload) -> str | None:
    """No mean of z z^T, z = (phi, onehot(y)), has an eigenvalue below 0, but for rounding: nor has that of phi alone.

    Where honest scores hardly vary A is next to 0, and the layer takes B there nearly over the ridge: it has to fit A.
    """
    moments = upload[PART]
    first, matrix = moments["first"].double(), matrix_of(moments)
    whole = torch.cat([torch.cat([matrix, first], 1), torch.cat([first.mT, first[-1].diag()], 1)])
    if not bool(torch.isfinite(whole).all()):
        return None  # which is said elsewhere
    least = float(torch.linalg.eigvalsh(whole)[0])
    rounding = 100 * len(whole) * torch.finfo(moments["second"].dtype).eps
    if least >= -rounding:
        return None
    return f"'{PART}/second' and '{PART}/first' have the eigenvalue {least:g}, a mean of squares has none below 0"


def solved(moments: Params, ridge: float) -> Tensor:
    """W [q + 1, q] of (A + ridge I) W = B, in double precision.

    The eigenvalues of a mean of squares are not below 0, and so none of the sum is below `ridge`: one liar could have
    brought some next to 0, and W, which is divided by them, anywhere.
    """
    first = moments["first"]
    values, vectors = torch.linalg.eigh(matrix_of(moments))
    found: Tensor = vectors @ (vectors.mT @ first.double() / (values.clamp(min=0) + ridge).unsqueeze(1))
    return found.to(first.dtype)
