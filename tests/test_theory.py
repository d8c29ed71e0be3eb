"""The theory's numbers in short, and the pages that state them."""

from __future__ import annotations

import math

import pytest

from benchmarks.algorithms import page as algorithms_page
from benchmarks.theory import bytes as moved
from benchmarks.theory import convex
from benchmarks.theory import page as theory_page
from benchmarks.theory.descent import descend
from benchmarks.theory.problem import minimum
from benchmarks.theory.store import load

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
    assert algorithms_page.text(algorithms_page.load()) == algorithms_page.PAGE.read_text()
