"""FedDANE and FisherLBFGS against plain float64 loops, the recursion against dense BFGS."""

from __future__ import annotations

import pytest
import torch

import fedge
from fedge.algorithms import lbfgs
from tests.against import clients_of, cohorts_of, order_of
from tests.cases import close, generator, ragged, toy_data, toy_model
from tests.reference.feddane import feddane
from tests.reference.fisher_lbfgs import fisher_lbfgs
from tests.reference.two_loop import dense_bfgs, two_loop


def random_pairs(m: int, d: int = 12) -> tuple[list, torch.Tensor]:
    """Pairs of a positive definite quadratic, y = A s, and a gradient."""
    g = generator(m)
    root = torch.randn(d, d, generator=g, dtype=torch.float64)
    matrix = root @ root.T / d + torch.eye(d, dtype=torch.float64)
    steps = torch.randn(m, d, generator=g, dtype=torch.float64)
    return [(s, matrix @ s) for s in steps], torch.randn(d, generator=g, dtype=torch.float64)


def split(vector: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": vector[:5], "b": vector[5:].view(-1, 1)}


@pytest.mark.parametrize("m", [1, 2, 5, 10])
def test_vector_free_recursion_against_the_ordinary_one_and_the_dense_matrix(m: int) -> None:
    pairs, g = random_pairs(m)
    found = lbfgs.direction([(split(s), split(y)) for s, y in pairs], split(g))
    flat = torch.cat([leaf.flatten() for leaf in found.values()])
    assert float((flat + two_loop(pairs, g)).abs().max()) < 1e-12
    assert float((flat + dense_bfgs(pairs) @ g).abs().max()) < 1e-12


def test_the_recursion_reads_dot_products_only() -> None:
    """The coefficients are the same for any basis with the same Gram matrix, here a rotated one."""
    pairs, g = random_pairs(3)
    basis = [s for s, _ in pairs] + [y for _, y in pairs] + [g]
    rotation, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator(1), dtype=torch.float64))
    one = lbfgs.two_loop(lbfgs.gram([split(v) for v in basis]))
    other = lbfgs.two_loop(lbfgs.gram([split(rotation @ v) for v in basis]))
    assert one.shape == (7,)
    assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("cohort", "clip", "inner"), [("same", None, 1.0), ("new", None, 1.0), ("same", 0.4, 0.3), ("new", None, 0.3)]
)
def test_feddane_against_the_plain_loop(cohort: str, clip: float | None, inner: float) -> None:
    options = {"lr": 0.1, "epochs": 2, "batch_size": 4, "mu": 0.3, "clip": clip, "inner_decay": inner}
    federation = ragged(toy_data())
    run = fedge.train(fedge.FedDANE(toy_model(), cohort=cohort, **options), federation, rounds=3, cohort=4, seed=9)
    cohorts = cohorts_of(federation, 3, 4, 9, fresh=(True, cohort == "new"))
    expected = feddane(toy_model(), clients_of(federation), cohorts, order_of(federation, 9), **options)
    assert close(run.params, expected) < 1e-10
    assert cohorts[0][0] != cohorts[0][1] or cohort == "same"


VARIANTS = {
    f"{source}_{curvature}_{at}": {"source": source, "curvature": curvature, "curvature_at": at}
    for source in ("gradient", "update")
    for curvature in ("diagonal", "product")
    for at in ("same", "next")
} | {
    "gauss_newton": {"source": "gradient", "curvature": "product", "matrix": "gauss_newton"},
    "gauss_newton_update": {"source": "update", "curvature": "product", "matrix": "gauss_newton"},
    "candidates": {"source": "gradient", "curvature": "product", "candidates": (0.3, 1.0, 2.0)},
    "candidates_next": {"source": "update", "curvature": "diagonal", "curvature_at": "next", "candidates": (0.5, 1.5)},
    "squared_slopes": {"source": "update", "curvature": "product", "matrix": "squared_slopes"},
    "dampings": {"source": "update", "curvature": "product", "matrix": "gauss_newton", "dampings": (0.0, 0.2, 3.0)},
    "dampings_next": {"source": "gradient", "curvature_at": "next", "dampings": (0.05, 1.0)},
    "precondition": {"source": "update", "direction": "diagonal"},
    "precondition_dampings": {"source": "gradient", "direction": "diagonal", "dampings": (0.05, 0.5, 2.0)},
    "clip": {"source": "update", "clip": 0.4},
    "first_step": {"source": "gradient", "curvature": "diagonal", "first_step": 0.05},
    "all_refused": {"source": "gradient", "curvature": "product", "damping": 0.0, "floor": 1e3},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_fisher_lbfgs_against_the_plain_loop(name: str) -> None:
    options = {"epochs": 2, "batch_size": 4, "local_lr": 0.1, "lr": 0.7, "memory": 2, "damping": 0.2}
    options |= {"weight_decay": 0.01, "first_step": None} | VARIANTS[name]
    federation = ragged(toy_data())
    run = fedge.train(fedge.FisherLBFGS(toy_model(), **options), federation, rounds=4, cohort=5, seed=9)
    cohorts = cohorts_of(federation, 4, 5, 9, fresh=(True, False, False))
    expected, refused = fisher_lbfgs(toy_model(), clients_of(federation), cohorts, order_of(federation, 9), **options)
    assert close(run.params, expected) < 1e-10
    assert run.history[-1]["refused_pairs"] == refused
    assert refused == (4 if name == "all_refused" else 0)
    assert not (refused and run.history[-1]["accepted_pairs"])
    if name != "all_refused":
        assert len(run.state["pairs"]) == (0 if "precondition" in name else 2)


def test_the_record_says_whether_the_curvature_acts() -> None:
    """Against the pairs and steps of the state; at "next" a pair is offered one round later."""
    federation = ragged(toy_data())
    for at in ("same", "next"):
        algorithm = fedge.FisherLBFGS(toy_model(), epochs=2, batch_size=4, damping=0.1, curvature_at=at)
        before = fedge.train(algorithm, federation, rounds=2, cohort=5, seed=9)
        run = fedge.train(algorithm, federation, rounds=1, cohort=5, seed=9, start=before)
        record = run.history[-1]
        s, y = (torch.cat([leaf.flatten() for leaf in one.values()]) for one in run.state["pairs"][-1])
        assert record["cos_sy"] == pytest.approx(float(torch.cosine_similarity(s, y, 0)), abs=1e-12)
        assert record["length_sy"] == pytest.approx(float(y.norm() / s.norm()))
        assert record["accepted_pairs"] == (3 if at == "same" else 2)
        assert run.history[0].get("cos_step") == pytest.approx(1.0)  # no pair yet: the mean update itself
        assert 0 < record["cos_step"] < 1 - 1e-6
    assert "cos_sy" not in run.history[0]


def test_a_large_damping_is_seen_to_leave_no_curvature() -> None:
    options = {"epochs": 2, "batch_size": 4, "damping": 1e3}
    algorithm = fedge.FisherLBFGS(toy_model(), **options)
    run = fedge.train(algorithm, ragged(toy_data()), rounds=3, cohort=5)
    assert run.history[-1]["cos_sy"] > 1 - 1e-6
    assert run.history[-1]["length_sy"] == pytest.approx(1e3, rel=1e-3)


def test_classes_of_fedova_have_the_mean_of_their_cosines_and_the_sum_of_their_pairs() -> None:
    inner = fedge.FisherLBFGS(toy_model(outputs=2), epochs=2, batch_size=4)
    run = fedge.train(fedge.FedOVA(inner, classes=3), ragged(toy_data()), rounds=2, seed=9)
    each = [inner.notes(one) for one in run.state]
    assert str(run.history[-1]["accepted_pairs"]) == "6"  # a count, not 6.0
    assert run.history[-1]["cos_sy"] == pytest.approx(sum(one["cos_sy"] for one in each) / 3)


def test_batch_square_is_what_its_name_says() -> None:
    from tests.reference.curvature import batch_square

    data = toy_data()
    federation = fedge.Federation(data, [range(len(data.train_y))])
    algorithm = fedge.FisherLBFGS(toy_model(), source="gradient", matrix="batch_square", batch_size=7, damping=0.0)
    run = fedge.train(algorithm, federation, rounds=1, seed=2)
    batches = order_of(federation, 2)(0, 0, 0, 1, 7)
    diagonal = batch_square(toy_model(), [(data.train_x[b], data.train_y[b]) for b in batches])
    ((s, y),) = run.state["pairs"]
    assert close(y, {name: diagonal[name] * s[name] for name in s}) < 1e-12


def test_a_candidate_that_overflows_is_merely_not_chosen() -> None:
    federation = ragged(toy_data())
    steep = fedge.FisherLBFGS(toy_model(), source="gradient", candidates=(0.5, 1.0, 1e38))
    plain = fedge.FisherLBFGS(toy_model(), source="gradient", candidates=(0.5, 1.0))
    one, two = (fedge.train(a, federation, rounds=2, cohort=4) for a in (steep, plain))
    assert one.history[-1]["dropped"] == []
    assert close(one.params, two.params) == 0


def test_a_gradient_of_zero_stays_where_it_is() -> None:
    data = toy_data()
    same = fedge.data.Data(torch.zeros_like(data.train_x), data.train_y, data.test_x, data.test_y, 3)
    model = torch.nn.Linear(6, 3, bias=False).double()
    run = fedge.train(fedge.FisherLBFGS(model, source="gradient"), fedge.Federation(same, [range(90)]), rounds=2)
    assert torch.equal(run.params["weight"], model.weight.detach())
    assert run.history[-1]["refused_pairs"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory is 0, it must be a whole number of at least 1"),
        ({"damping": -0.1}, "damping is -0.1, it must be 0 or more"),
        ({"matrix": "gauss_newton"}, r"matrix \(with curvature 'diagonal'\) is 'gauss_newton'"),
        ({"curvature": "product", "matrix": "batch_square"}, r"must be one of \['fisher', 'gauss_newton', 'squared"),
        ({"candidates": (1.0,), "dampings": (1.0,)}, "choose by one of them"),
        ({"dampings": (-1.0,)}, "dampings is -1.0, it must be 0 or more"),
        ({"direction": "diagonal", "curvature": "product"}, "direction is 'diagonal', but curvature is 'product'"),
        ({"source": "gradiant"}, r"source is 'gradiant' \(did you mean 'gradient'\?\)"),
        ({"batches": 3}, "batches is 3, but it limits the gradient: set source='gradient'"),
        ({"candidates": (1.0, 0.0)}, "candidates is 0.0, it must be greater than 0"),
        ({"first_step": -1.0}, "first_step is -1.0"),
        ({"curvature_at": "later"}, "curvature_at is 'later'"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedge.FisherLBFGS(toy_model(), **options)
