"""Partitions: every example exactly once, the promised shape, repeatable, clear errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedge import partition
from fedge.partition.shares import round_shares

Parts = list[NDArray[np.int64]]

fast = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32)

SEEDED: dict[str, Callable[..., Parts]] = {
    "iid": partition.iid,
    "labels_per_client": partition.labels_per_client,
    "dirichlet": partition.dirichlet,
    "quantity_skew": partition.quantity_skew,
}
LABELS = np.arange(2000) % 10


def assert_exact_cover(parts: Parts, examples: int) -> None:
    """Each example occurs once over all clients; each client's indices ascend."""
    assert sorted(np.concatenate(parts).tolist()) == list(range(examples))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


@st.composite
def label_problems(draw: st.DrawFn) -> tuple[NDArray[np.int64], int, int]:
    """Labels with uneven counts, and clients and labels per client that divide."""
    distinct = draw(st.integers(1, 7))
    labels = draw(st.integers(1, distinct))
    step = distinct // np.gcd(distinct, labels)
    clients = int(step) * draw(st.integers(1, 8))
    parts = labels * clients // distinct
    counts = [parts + draw(st.integers(0, 20)) for _ in range(distinct)]
    y = np.repeat(np.arange(distinct) * 3 + 5, counts)  # labels need not start at 0
    return np.random.default_rng(draw(seeds)).permutation(y), clients, labels


@fast
@given(label_problems(), seeds)
def test_labels_per_client(problem: tuple[NDArray[np.int64], int, int], seed: int) -> None:
    y, clients, labels = problem
    parts = partition.labels_per_client(y, clients, labels, seed)
    assert len(parts) == clients
    assert_exact_cover(parts, len(y))
    assert all(len(np.unique(y[part])) == labels for part in parts)
    for label in np.unique(y):
        held = [n for part in parts if (n := int((y[part] == label).sum()))]
        assert len(held) == labels * clients // len(np.unique(y))
        assert max(held) - min(held) <= 1


@fast
@given(st.integers(1, 60), st.integers(0, 200), seeds)
def test_iid(clients: int, extra: int, seed: int) -> None:
    examples = clients + extra
    parts = partition.iid(np.zeros(examples), clients, seed)
    sizes = [len(part) for part in parts]
    assert len(parts) == clients
    assert_exact_cover(parts, examples)
    assert max(sizes) - min(sizes) <= 1


@fast
@given(
    st.sampled_from([partition.dirichlet, partition.quantity_skew]),
    st.integers(1, 12),
    st.floats(0.3, 100),
    st.integers(0, 3),
    seeds,
)
def test_skewed(method: Callable[..., Parts], clients: int, alpha: float, least: int, seed: int) -> None:
    y = np.random.default_rng(seed).integers(5, size=1500)
    parts = method(y, clients, alpha, seed, least)
    assert len(parts) == clients
    assert_exact_cover(parts, len(y))
    assert min(len(part) for part in parts) >= least


@fast
@given(st.lists(st.integers(-5, 5) | st.integers(10**9, 10**9 + 3), min_size=1))
def test_by_group(groups: list[int]) -> None:
    parts = partition.by_group(groups)
    assert_exact_cover(parts, len(groups))
    assert [set(np.array(groups)[part]) for part in parts] == [{g} for g in sorted(set(groups))]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(0, 10**6))
def test_rounded_shares_keep_the_total(raw: list[float], total: int) -> None:
    shares = (np.array(raw) + 1e-3) / (np.array(raw) + 1e-3).sum()
    counts = round_shares(shares[None], np.array([total]))[0]
    assert counts.sum() == total
    assert counts.min() >= 0
    assert np.abs(counts - shares * total).max() <= 1 + 1e-6


@pytest.mark.parametrize("name", SEEDED)
def test_seed_alone_decides(name: str) -> None:
    first, again, other = (SEEDED[name](LABELS, clients=20, seed=s) for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", SEEDED)
def test_global_random_state_is_left_alone(name: str) -> None:
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    SEEDED[name](LABELS, clients=20)
    assert np.random.random() == expected


@pytest.mark.parametrize("name", SEEDED)
def test_arrays_lists_and_tensors_are_equal(name: str) -> None:
    kinds = LABELS, LABELS.tolist(), torch.from_numpy(LABELS)
    results = [SEEDED[name](y, clients=20) for y in kinds]
    for parts in zip(*results, strict=True):
        assert np.array_equal(parts[0], parts[1])
        assert np.array_equal(parts[0], parts[2])


def test_label_pairs_are_well_mixed() -> None:
    pairs = {
        tuple(np.unique(LABELS[part]))
        for seed in range(10)
        for part in partition.labels_per_client(LABELS, 100, 2, seed)
    }
    assert len(pairs) == 45  # all of 10 choose 2; 1,000 draws miss one with probability 1e-8


def test_no_client_is_favoured() -> None:
    """Parts of uneven size must not go by client number: 29 examples in 20 parts."""
    y = np.repeat(np.arange(10), 29)
    sizes = np.zeros(100)
    for seed in range(40):
        sizes += [len(part) for part in partition.labels_per_client(y, 100, 2, seed)]
    assert abs(sizes[:50].mean() - sizes[50:].mean()) < 0.04 * sizes.mean()


def test_alpha_sets_the_skew() -> None:
    def labels_held(alpha: float) -> float:
        parts = partition.dirichlet(LABELS, 10, alpha)
        return float(np.mean([len(np.unique(LABELS[part])) for part in parts]))

    assert labels_held(0.05) < 5 < 9.9 < labels_held(100.0)

    sizes = [len(part) for part in partition.quantity_skew(LABELS, 10, alpha=1000.0)]
    uneven = [len(part) for part in partition.quantity_skew(LABELS, 10, alpha=0.5)]
    assert max(sizes) < 1.3 * min(sizes)
    assert max(uneven) > 3 * min(uneven)


def test_quantity_skew_ignores_labels() -> None:
    largest = max(partition.quantity_skew(LABELS, 4, seed=2), key=len)
    counts = np.bincount(LABELS[largest], minlength=10)
    assert np.allclose(counts / len(largest), 0.1, atol=0.03)


def test_groups_may_be_strings() -> None:
    for groups in (["bob", "ann", "bob"], np.array(["bob", "ann", "bob"], dtype=object)):
        assert [part.tolist() for part in partition.by_group(groups, y=[0, 1, 0])] == [[1], [0, 2]]


def test_many_clients_are_vectorised() -> None:
    y = np.arange(400_000) % 10
    parts = partition.dirichlet(y, clients=100_000, alpha=0.5, min_examples=0)
    assert len(parts) == 100_000
    assert sum(map(len, parts)) == len(y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition.iid([0, 1], 3), "3 clients but only 2 examples: use at most 2"),
        (lambda: partition.iid([0, 1], 0), "clients is 0, must be a whole number of at least 1"),
        (lambda: partition.iid([0, 1], 1.5), "clients is 1.5"),  # type: ignore[arg-type]
        (lambda: partition.iid([], 1), "at least 1 example"),
        (lambda: partition.iid([0, 1], 1, seed=-1), "seed is -1"),
        (lambda: partition.iid([0, 1], 1, seed=None), "seed is None"),  # type: ignore[arg-type]
        (lambda: partition.dirichlet(LABELS, 5, alpha=0.0), "alpha is 0.0, must be positive"),
        (lambda: partition.quantity_skew(LABELS, 5, alpha=np.nan), "alpha is nan"),
        (lambda: partition.dirichlet(LABELS, 5, alpha=10**400), r"alpha is 10+\.\.\., must be positive and finite"),
        (lambda: partition.quantity_skew(LABELS, 5, alpha=1e308), r"alpha is 1e\+308, must be positive and finite"),
        (
            lambda: partition.dirichlet(LABELS, 100, min_examples=21),
            "need 2100 examples, there are 2000: use at most 95 clients or min_examples=20",
        ),
        (
            lambda: partition.quantity_skew(LABELS, 1000, alpha=0.1),
            "in 1000 draws .* never had more than 0 examples, min_examples is 1: raise alpha",
        ),
        (lambda: partition.dirichlet(LABELS / 2, 5), "dtype float64, labels must be integers"),
        (lambda: partition.dirichlet(LABELS.reshape(-1, 2), 5), "flatten"),
        (
            lambda: partition.labels_per_client(LABELS, 98, 2),
            r"2 \* 98 = 196 must be divisible by the 10 .* clients=100",
        ),
        (lambda: partition.labels_per_client(LABELS, 1, 3), "clients=10"),
        (lambda: partition.labels_per_client(LABELS, 10, 11), "use labels <= 10"),
        (lambda: partition.labels_per_client(LABELS, 10, 0), "labels is 0"),
        (
            lambda: partition.labels_per_client([0, 0, 0, 0, 0, 0, 1, 1], 6, 1),
            "label 1 has 2 examples but must be cut .* = 3 parts: use at most 4 clients",
        ),
        (
            lambda: partition.labels_per_client([0, 0, 0, 1, 2], 3, 2),
            "label 1 has 1 examples .* use fewer labels per client",
        ),
        (lambda: partition.by_group([1, 2], y=[0]), "groups has 2 ids and y 1 labels"),
        (lambda: partition.by_group([0.5, 1.0]), "dtype float64"),
        (lambda: partition.by_group([]), "at least 1 example"),
    ],
)
def test_errors_name_value_limit_and_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@fast
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
def test_the_suggested_number_of_clients_works(distinct: int, labels: int, clients: int) -> None:
    y = np.arange(distinct * 60) % distinct
    if labels > distinct or labels * clients % distinct == 0 or clients > len(y):
        return
    with pytest.raises(ValueError, match="clients=") as error:
        partition.labels_per_client(y, clients, labels)
    nearest = int(str(error.value).rsplit("=", 1)[1])
    works = [k for k in range(1, 60) if labels * k % distinct == 0]
    assert abs(nearest - clients) == min(abs(k - clients) for k in works)
    assert nearest in works
