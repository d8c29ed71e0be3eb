"""DONE: Dinh, Tran, Nguyen, Bao, Rezaei Balef, Zhou and Zomaya, DONE: Distributed Approximate Newton-type Method for
Federated Edge Learning, IEEE Transactions on Parallel and Distributed Systems 2022."""

from __future__ import annotations

from dataclasses import dataclass

from fedge import tree
from fedge.algorithms.local_newton import LocalNewton, Times
from fedge.checks import at_least_one, positive
from fedge.core import Carry, Params


@dataclass(frozen=True, eq=False)
class DONE(LocalNewton):
    """The mean over clients of H_k^{-1} g, each by Richardson iterations, which need no dot products and no divisions.

        g_t     = sum_k n_k grad F_k(w_t) / sum_k n_k + weight_decay w_t
        p_k^0   = 0,   p_k^{r+1} = p_k^r - alpha ((H_k + (weight_decay + damping) I) p_k^r - g_t),  r < `iterations`
        w_{t+1} = w_t - lr sum_k n_k p_k^R / sum_k n_k

    H_k is the Gauss-Newton matrix of client k's examples at w_t (`matrix="fisher"`: the empirical Fisher matrix); it is
    the Hessian for softmax regression, the paper's case. The iterations converge for alpha below 2 / (the largest
    eigenvalue of any client's matrix), and diverge above. R of them sum up alpha (I - alpha H_k)^r g, r < R. With a
    small R or alpha the step is near alpha R g, which is a regularisation too. With `batch_size` every iteration takes
    the next batch instead of all examples. `candidates`: the cohort is asked for its loss at w_t - a lr p for each a,
    and the best is taken, 0 being no step; with none, a is 1.

    The record of a round has `cos_step` = cos(p, g) and `length_step` = |p| / |g|.

    Bytes per round, d parameters of b bytes, cohort c: down 2 c d b, up 2 c (d b + 4); with q candidates also
    down c d b, up c (q b + 4).
    """

    alpha: float = 0.05
    batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("alpha", self.alpha)
        at_least_one("batch_size", self.batch_size, optional=True)

    def _batch_size(self) -> int | None:
        return self.batch_size

    def begin(self, g: Params) -> Carry:
        return tree.zeros_like(g)

    def improve(self, g: Params, carry: Carry, times: Times) -> Carry:
        return tree.axpy(-self.alpha, tree.sub(times(carry), g), carry)

    def solution(self, carry: Carry) -> Params:
        p: Params = carry
        return p
