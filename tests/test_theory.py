"""The theory's numbers in short, and the pages that state them."""

from __future__ import annotations

import math

import pytest
import torch

import fedge
from benchmarks.algorithms import page as algorithms_page
from benchmarks.theory import bytes as moved
from benchmarks.theory import constants, convex, newton
from benchmarks.theory import page as theory_page
from benchmarks.theory.descent import descend
from benchmarks.theory.problem import Objective, minimum
from benchmarks.theory.store import load
from fedge.algorithms import ALGORITHMS, ASYNCHRONOUS
from fedge.core import Batch
from fedge.handle import Handle
from tests.reference.two_loop import dense_bfgs

F = convex.objective()


@pytest.fixture(scope="module")
def best() -> float:
    """f*, certified: a strongly convex f is at most |grad f|^2 / (2 l2) above its minimum."""
    found = minimum(F)
    assert found["error_bound"] < 1e-10
    return found["value"]


def test_without_noise_the_optimum_is_reached_linearly(best: float) -> None:
    """Every client, all batches: Theorem 1 with N = 0."""
    curve = convex.gaps(F, best, "non-IID-2", 100)
    assert min(curve) < 1e-8
    assert convex.rate(curve, 10, 90) < 0.9


def test_a_tenth_of_the_rounds_of_gradient_descent(best: float) -> None:
    """The stored step is the best of gradient descent: it lies at the edge of stability."""
    step, target = load("convex")["race"]["step"], best + 1e-6
    values = descend(F, target, step, 1500)
    assert values[-1] < target
    rounds = len(values) - 1
    assert descend(F, target, 1.05 * step, rounds)[-1] > best + 1e-3  # a little longer, and it never arrives
    fast = convex.first_below(convex.gaps(F, best, "one client", rounds // 10), 1e-6)
    assert fast is not None


def test_noise_leaves_a_neighbourhood(best: float) -> None:
    """One batch of 20 clients stays far from the optimum, every client with all batches does not."""
    noisy = convex.gaps(F, best, "non-IID-2", 100, **convex.BASE)
    assert 1e-3 < min(noisy[-20:]) < max(noisy[-20:]) < 0.3


def test_stored_neighbourhoods_shrink_as_theorem_1_says() -> None:
    """With a smaller step, with more batches, with more clients; on both partitions."""
    stored = load("convex")["noise"]
    for kind in convex.PARTITIONS:
        for changes in convex.NOISE.values():
            wanted = [{"partition": kind, **convex.BASE, **change} for change in changes]
            plateaus = [next(r["plateau"] for r in stored if want.items() <= r.items()) for want in wanted]
            assert plateaus == sorted(plateaus, reverse=True)


def test_gauss_newton_is_the_hessian_of_the_problem() -> None:
    """All 650 x 650 entries: the closed form, the second derivatives by autograd, and the handle's products."""
    few = Objective(F.model, F.l2, F.x[:200], F.y[:200])
    w = few.start()
    closed = constants.hessian(few, w)
    pieces = torch.func.hessian(few)(w)
    rows = [[pieces[a][b].flatten(len(w[a].shape)).flatten(0, -2) for b in w] for a in w]  # weight first, then bias
    places = torch.arange(650).view(10, 65)
    order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    exact = torch.cat([torch.cat(row, 1) for row in rows])
    assert float((closed[order][:, order] - exact).abs().max()) < 1e-12
    handle = Handle(F.model, fedge.cross_entropy)
    batch = Batch(few.x, few.y, torch.ones(200, dtype=torch.bool), torch.tensor(0))
    v = {n: torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype) for n, p in w.items()}
    found = handle.sum_gauss_newton_product(w, batch, v)
    flat = torch.cat([found[n].flatten() / 200 + F.l2 * v[n].flatten() for n in w])
    assert float((flat - exact @ torch.cat([leaf.flatten() for leaf in v.values()])).abs().max()) < 1e-12


def test_extreme_eigenvalues_are_those_of_the_dense_bfgs_matrix() -> None:
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(9, 9, generator=draw, dtype=torch.float64)
    pairs = [(s, (root @ root.T + torch.eye(9)) @ s) for s in torch.randn(4, 9, generator=draw, dtype=torch.float64)]
    values = torch.linalg.eigvalsh(dense_bfgs(pairs))
    found = constants.extremes([({"w": s}, {"w": y}) for s, y in pairs])
    assert found == pytest.approx((float(values[0]), float(values[-1])), rel=1e-9)


def test_the_bound_of_theorem_1_is_void_here() -> None:
    """From the stored constants; the noise of single examples is computed again, one gradient per example."""
    stored = load("constants")
    best = constants.optimum(F)
    assert F.squared_gradient(best) < 1e-28
    each = torch.func.vmap(torch.func.grad(lambda w, x, y: alone(x, y)(w)), (None, 0, 0))(best, F.x, F.y)
    assert stored["N"] == pytest.approx(2 * float(sum((leaf**2).flatten(1).sum(1) for leaf in each.values()).mean()))
    assert stored["at_optimum"][1] < stored["smooth"]
    for run in stored["runs"]:
        (low, high), n = run["theta"], stored["N"] if run["neighbourhood"] else 0.0
        batch = 100 if n else stored["examples"]
        mu = high**2 * (1e-3 + stored["smooth"] * (1437 - batch) / (batch * 1436)) * stored["smooth"]
        assert run["largest_step"] == pytest.approx(1e-3 * low / mu)
        assert run["largest_step"] < run["step"] / 1e6
        alpha = run["largest_step"] / 2
        factor = 2 * alpha * (1e-3 * low - alpha * mu)
        assert run["rounds_to_half"] == pytest.approx(math.log(2) / factor)
        assert run["neighbourhood"] == pytest.approx(alpha * high**2 * stored["smooth"] * n / (2 * factor / alpha))
        assert not n or run["neighbourhood"] > stored["start_gap"]


def alone(x: torch.Tensor, y: torch.Tensor) -> Objective:
    return Objective(F.model, F.l2, x[None], y[None])


def step_of(algorithm: fedge.Algorithm, federation: fedge.Federation) -> torch.Tensor:
    """w_0 - w_1, as one vector in the order of `constants.together`."""
    run = fedge.train(algorithm, federation, rounds=1)
    start = F.start()
    return (constants.together(start) - constants.together(run.params)).flatten()


@pytest.mark.parametrize("name", ["GIANT", "DONE"])
def test_giant_and_done_against_dense_hessians_of_the_clients(name: str) -> None:
    """The mean over three clients of 479 examples of H_k^{-1} g, and of 15 Richardson iterations."""
    data = fedge.data.Data(F.x, F.y, F.x[:10], F.y[:10], 10)
    federation = fedge.Federation(data, fedge.partition.iid(F.y, 3, seed=0))
    w, total = F.start(), 0
    g = constants.together(torch.func.grad(F)(w)).flatten()
    for k in range(3):
        chosen = federation.examples(k)
        h = constants.hessian(Objective(F.model, F.l2, F.x[chosen], F.y[chosen]), w)
        p = torch.zeros_like(g)
        for _ in range(15):
            p = p - 0.2 * (h @ p - g)
        total = total + len(chosen) / 1437 * (torch.linalg.solve(h, g) if name == "GIANT" else p)
    common = {"weight_decay": F.l2, "damping": 0.0, "candidates": ()}
    giant = fedge.GIANT(F.model, iterations=120, **common)
    done = fedge.DONE(F.model, alpha=0.2, iterations=15, **common)
    found = step_of(giant if name == "GIANT" else done, federation)
    assert float((found - total).norm() / total.norm()) < 1e-6
    assert name == "GIANT" or float((found - total).abs().max()) < 1e-12


def test_giant_with_one_client_is_newtons_method(best: float) -> None:
    curve = newton.gaps(F, best, "GIANT", "one client", 6, iterations=30, candidates=())
    assert curve[6] < 1e-6 < curve[3]
    stored = {(run["algorithm"], run["clients"], bool(run["candidates"])): run for run in load("newton")["runs"]}
    assert stored["GIANT", "10 clients, IID", False]["last"] > 1  # what the page says of length 1
    assert stored["GIANT", "10 clients, IID", True]["last"] < 1e-6


def test_bytes_of_the_ledger_equal_the_formulas() -> None:
    for row in moved.measure((10, 100)):
        assert row["ledger"] == row["star_total"] == row["tree_total"]
        assert row["tree_hops"] == math.ceil(math.log2(row["tau"] + 1))
        down, up = moved.formula(row["algorithm"])
        assert row["tree_path"] == row["tree_hops"] * (down + up)
        assert row in load("bytes")["rows"]


@pytest.mark.parametrize("tau", [1, 2, 3, 7, 8, 100])
def test_the_tree_reaches_everyone_once(tau: int) -> None:
    messages = moved.binomial_tree(tau)
    assert sorted(to for _, _, to in messages) == list(range(1, tau + 1))
    arrived = {0: 0}
    for step, source, to in messages:
        assert arrived[source] < step
        arrived[to] = step
    assert len({(step, source) for step, source, _ in messages}) == tau  # nobody sends twice at once


def test_the_pages_say_what_was_stored() -> None:
    """If not: `python -m benchmarks.algorithms --page`, and `python -m benchmarks.theory --page`."""
    text = theory_page.PAGE.read_text()
    assert theory_page.filled(text) == text
    text = algorithms_page.text(algorithms_page.load())
    assert text == algorithms_page.PAGE.read_text()
    assert [
        kind.__name__ for kind in {**ALGORITHMS, **ASYNCHRONOUS}.values() if f"### `{kind.__name__}`" not in text
    ] == []
