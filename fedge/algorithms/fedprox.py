"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, Federated Optimization in Heterogeneous Networks,
MLSys 2020."""

from __future__ import annotations

from dataclasses import dataclass

from fedge import tree
from fedge.algorithms.fedavg import FedAvg
from fedge.checks import non_negative
from fedge.core import Params, Payload


@dataclass(frozen=True, eq=False)
class FedProx(FedAvg):
    """FedAvg whose clients are held back: their local problem has a proximal term (Eq. 2).

        w_k     = E epochs of local steps on  F_k(w) + mu/2 |w - w_t|^2,  from w_t
        w_{t+1} = server step along  sum_k n_k (w_k - w_t) / sum_k n_k

    All other fields are those of FedAvg. The term is part of the gradient that is clipped and that the optimiser gets.
    mu = 0 is FedAvg. The paper also lets slow clients stop early: `fedge.edge.PartialWork`.

    Bytes per round: those of FedAvg; d parameters of b bytes, cohort c: down c d b, up c (d b + 4).
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative("mu", self.mu)

    def _bend(self, sent: Payload, held: Params, params: Params, grad: Params) -> Params:
        return tree.axpy(self.mu, tree.sub(params, sent["params"]), grad)
