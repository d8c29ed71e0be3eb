"""Numbers that a server divides by or counts with: one that no client can have is refused, and ends no run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedge
from fedge.algorithms.lbfgs import compared
from fedge.core import Range
from fedge.engine import Loopback, Simulator, TooFewReplies
from fedge.engine.links import wire
from fedge.engine.uploads.sizes import Usual
from tests.cases import algorithms, close, first_order, one_holder, ragged, second_order, toy_data, toy_model, wide

LIAR = 2


class Liar(Loopback):
    """One client says something else of a part."""

    part: str
    lie: Callable[[str, Tensor, int], Tensor]

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        for upload, _ in (one for uploads in answer.values() for one in uploads) if client == LIAR else ():
            if self.part in upload:
                upload[self.part] = {n: self.lie(n, leaf, at.round) for n, leaf in upload[self.part].items()}
        return wire.encode(answer)


def trained(
    algorithm: Any,
    part: str,
    lie: Callable[[str, Tensor, int], Tensor],
    federation: fedge.Federation | None = None,
    **options: Any,
) -> fedge.Run:
    federation = ragged(toy_data()) if federation is None else federation
    link = Liar(algorithm, federation)
    link.part, link.lie = part, lie
    return fedge.train(algorithm, federation, **({"rounds": 4, "seed": 0, "link": link} | options))


def only(name: str, value: float) -> Callable[[str, Tensor, int], Tensor]:
    return lambda leaf, old, _: torch.full_like(old, value) if leaf == name else old


def flipped(first: Tensor) -> Tensor:
    """Means of features and labels with another sign, but for the shares of the labels."""
    return torch.cat([-first[:-1], first[-1:]]) if first.dim() > 1 else first


CASES = {
    "nobody was seen": ("scaffold_counted", "presence", only("new", -6.0)),
    "all are forgotten later": (
        "scaffold_counted",
        "presence",
        lambda _, leaf, t: torch.full_like(leaf, -7.0 if t == 2 else 0),
    ),
    "less than nobody, by class": ("fedova_scaffold", "presence", lambda _, leaf, t: torch.full_like(leaf, -2.0 - t)),
    "a negative sum of weights": ("scaffold_weighted", "presence", only("inverse", -0.9)),
    "steps backwards": ("fednova", "steps", only("sum", -900.0)),
    "a path backwards": ("fedcm", "length", only("sum", -114.0)),
    "a path of no length": ("fedcm", "length", only("sum", 0.0)),
    "half a step": ("fedcm", "length", only("sum", 0.04)),
    "an infinite sum of weights": ("scaffold_weighted", "presence", only("inverse", 0.0)),
    "a sum of weights beyond all numbers": ("scaffold_weighted", "presence", only("inverse", 1e-17)),
    "negative squares": ("lbfgs_precondition", "diagonal", lambda _, leaf, t: torch.full_like(leaf, -3.375)),
    "fewer than no holders": ("shared_ova", "holders", only("labels", -3.0)),
    "a trace of a holder": ("shared_ova", "holders", only("labels", 1e-9)),
    "an accuracy of 900": ("fedper", "accuracy", only("own", 900.0)),
    "more steps than its examples make": ("fednova", "steps", only("sum", 300.0)),
    "a longer path than its examples make": ("fedcm", "length", only("sum", 9.0)),
    "moments beyond one": ("calibrated_fedavg", "moments", only("second", -1.5)),
    "means of squares below zero": ("calibrated_fedavg", "moments", only("second", -0.5)),
    "labels that follow from no features": ("calibrated_fedavg", "moments", lambda _, leaf, t: flipped(leaf)),
    "labels that are fewer than none": (
        "calibrated_fedavg",
        "moments",
        lambda _, leaf, t: -leaf if leaf.dim() > 1 else leaf,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_number_that_no_client_can_have_costs_its_client_alone(case: str) -> None:
    name, part, lie = CASES[case]
    algorithm = {**algorithms(), **first_order(), **second_order()}[name]
    run = trained(algorithm, part, lie)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert dropped
    assert {drop["client"] for drop in dropped} == {LIAR}
    assert all(f"'{part}/" in drop["reason"] for drop in dropped)
    assert not any("skipped" in record for record in run.history)


def in_single(kind: Any, **settings: Any) -> Any:
    return kind(toy_model(outputs=2, dtype=torch.float32), lr=0.1, epochs=1, batch_size=4, **settings)


DIVISORS = {
    "a path of no length": (lambda: in_single(fedge.FedCM), "length", "sum"),
    "a path of no length, shrinking": (lambda: in_single(fedge.FedCM, lr_decay=0.9), "length", "sum"),
    "an infinite sum of weights": (lambda: in_single(fedge.SCAFFOLD, weighted=True), "presence", "inverse"),
}


@pytest.mark.parametrize("case", DIVISORS)
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-39])
def test_what_the_server_divides_by_is_above_zero(case: str, value: float) -> None:
    """Of a class that the liar alone holds, no other client's number makes the mean larger."""
    make, part, name = DIVISORS[case]
    algorithm = fedge.FedOVA(make(), classes=3, weighted=True)
    run = trained(algorithm, part, only(name, value), federation=one_holder(LIAR))
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert {drop["client"] for drop in dropped} == {LIAR}
    assert all(f"'{part}/{name}' has {torch.tensor(value):g}, it must be from " in drop["reason"] for drop in dropped)
    assert not any("skipped" in record for record in run.history)


SMALL = {
    "a path shorter than its first step, shrinking": (lambda: in_single(fedge.FedCM, lr_decay=0.9), "length", "sum"),
    "a weight beyond its examples": (lambda: in_single(fedge.SCAFFOLD, weighted=True), "presence", "inverse"),
}


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("value", [1e-15, 1e-3])
def test_a_divisor_is_what_the_round_and_the_examples_make_of_it(case: str, value: float) -> None:
    """Else who is alone in a class once leaves a direction of any length there, or a control that stays for good."""
    make, part, name = SMALL[case]
    algorithm = fedge.FedOVA(make(), classes=3, weighted=True)
    run = trained(algorithm, part, only(name, value), federation=one_holder(LIAR))
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert [drop["client"] for drop in dropped] == [LIAR] * 4
    honest = trained(algorithm, part, lambda _, leaf, t: leaf, federation=one_holder(LIAR))
    assert all(record["dropped"] == [] for record in honest.history)


def test_who_says_that_it_weighs_less_than_its_examples_does_not_slow_the_control_down() -> None:
    """The mean of the inverses is the cohort's sum of weights: 1 in place of 1/8 halved it."""
    algorithm = fedge.SCAFFOLD(toy_model(), lr=0.1, epochs=1, batch_size=4, weighted=True)
    run = trained(algorithm, "presence", only("inverse", 1.0))
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert [drop["client"] for drop in dropped] == [LIAR] * 4
    assert all("'presence/inverse' has 1, it must be from 0.119048 to 0.13125" in drop["reason"] for drop in dropped)


def test_a_short_path_does_not_make_the_direction_grow() -> None:
    """One number of one device of ten: the direction grew by 5 % in every round, with `BoundedMean` too."""
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=10, seed=0))
    algorithm = fedge.Robust(
        fedge.FedCM(fedge.models.mlp(64, (32,), 10, seed=0), epochs=1, alpha=0.05), fedge.BoundedMean()
    )
    run = trained(algorithm, "length", lambda _, leaf, t: leaf * 0.3, federation, rounds=2)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert [drop["client"] for drop in dropped] == [LIAR] * 2
    assert all("'length/sum' has " in drop["reason"] for drop in dropped)


@pytest.mark.parametrize(
    "name",
    [
        "scaffold_counted",
        "fedcm",
        "fedcm_decay",
        "scaffold_weighted",
        "fedova_scaffold_weighted",
        "fednova",
        "fednova_decay",
        "shared_ova",
        "lbfgs",
        "fedper",
        "calibrated_fedavg",
    ],
)
def test_nobody_honest_is_outside(name: str) -> None:
    algorithm = {**algorithms(), **first_order()}[name]
    run = trained(algorithm, "", lambda _, leaf, t: leaf)
    assert all(record["dropped"] == [] for record in run.history)


def test_parts_that_a_codec_or_a_clip_changed_are_not_looked_at_as_they_were() -> None:
    """Error feedback may turn a small square negative, and a clip makes a fraction of any number."""
    for algorithm in (
        fedge.Compressed(fedge.FisherLBFGS(wide().model, epochs=1, batch_size=4, memory=2), fedge.Quantise(2)),
        fedge.Private(first_order()["shared_ova"], clip=0.5, noise=0.1, clients=7, expected=5, on_client=True),
        fedge.Private(first_order()["fedcm"], clip=0.01, noise=0.1, clients=7, expected=5, on_client=True),
    ):
        private = {"sampling": "poisson", "cohort": 5} if isinstance(algorithm, fedge.Private) else {}
        run = trained(algorithm, "", lambda _, leaf, t: leaf, **private)
        assert all(not record.get("dropped") for record in run.history)


@pytest.mark.parametrize("codec", [fedge.Quantise(8), fedge.TopK(0.1), fedge.Cast()])
def test_a_part_that_counts_is_not_encoded_however_many_numbers_it_has(codec: fedge.core.Codec) -> None:
    """A trace of a holder would make a head as long as it liked, and of a codec's numbers nobody could tell."""
    model = fedge.models.mlp(6, (5,), 70, seed=1).double()
    algorithm = fedge.Compressed(fedge.SharedOVA(model, lr=0.2, epochs=1, batch_size=4), codec)
    honest = trained(algorithm, "", lambda _, leaf, t: leaf)
    assert all(record["dropped"] == [] for record in honest.history)
    lied = trained(algorithm, "holders", lambda _, leaf, t: leaf * 1e-9 if leaf.is_floating_point() else leaf)
    assert {drop["client"] for record in lied.history for drop in record["dropped"]} == {LIAR}
    simulated = fedge.train(algorithm, ragged(toy_data()), rounds=4, seed=0)
    assert close(simulated.params, honest.params) < 1e-9


def test_moments_are_not_encoded_either() -> None:
    """With ten classes they are 176 numbers from -1 to 1."""
    inner = fedge.FedAvg(fedge.models.mlp(6, (5,), 10, seed=1).double(), lr=0.2, epochs=1, batch_size=4)
    algorithm = fedge.Compressed(fedge.Calibrated(inner, every=1), fedge.Cast())
    lied = trained(algorithm, "moments", lambda _, leaf, t: leaf * 30)
    assert {drop["client"] for record in lied.history for drop in record["dropped"]} == {LIAR}
    assert all("it must be from -1 to 1" in drop["reason"] for drop in lied.history[0]["dropped"])


def test_a_range_is_part_of_a_task() -> None:
    tasks = first_order()["shared_ova"].tasks(Loopback(first_order()["shared_ova"], ragged(toy_data())).runtime.handle)
    assert tasks["train"].ranges == (Range("holders", 0.0, 1.0, whole=True),)


@pytest.mark.parametrize("name", ["fednova", "fedova_fednova"])
def test_who_joins_with_more_examples_than_it_weighs_has_no_more_steps_for_them(name: str) -> None:
    """A device with data of its own is believed up to `max_weight`: what it counts with is not longer for 2^53."""
    algorithm, federation = algorithms()[name], ragged(toy_data())
    link = Liar(algorithm, federation, max_weight=100.0)
    link.part, link.lie = "steps", lambda _, leaf, t: torch.full_like(leaf, 1e9)
    sizes = link.directory.sizes
    link.directory.sizes = lambda clients: torch.where(clients == LIAR, 2**53 - 1, sizes(clients))
    run = fedge.train(algorithm, federation, rounds=2, seed=0, link=link)
    assert {drop["client"] for record in run.history for drop in record["dropped"]} == {LIAR}
    assert all("'steps/sum' has 1e+09, it must be" in drop["reason"] for drop in run.history[0]["dropped"])


@pytest.mark.parametrize("link", [Loopback, Simulator])
@pytest.mark.parametrize("name", ["fednova", "fedcm"])
def test_who_takes_more_steps_for_having_more_examples_is_no_liar(name: str, link: Any) -> None:
    """Two of six have 43 times the examples of the others."""
    federation = ragged(toy_data(), (1, 1, 43, 1, 1, 43))
    kind: Any = {"fednova": fedge.FedNova, "fedcm": fedge.FedCM}[name]
    algorithm = kind(toy_model(), lr=1.0, epochs=1, batch_size=1, clip=0.001)
    run = fedge.train(algorithm, federation, rounds=3, link=link(algorithm, federation, max_ratio=30.0))
    assert all(record["dropped"] == [] for record in run.history)


@pytest.mark.parametrize(("name", "part"), [("fednova", "steps"), ("fedcm", "length")])
def test_who_claims_many_more_steps_than_its_examples_make_is_one(name: str, part: str) -> None:
    run = trained(first_order()[name], part, lambda _, leaf, t: 2000 * leaf)
    assert [{drop["client"] for drop in record["dropped"]} for record in run.history] == [{LIAR}] * 4


@pytest.mark.parametrize(("kind", "part"), [(fedge.FedNova, "steps"), (fedge.FedCM, "length")])
def test_who_claims_whole_steps_when_they_have_shrunk_is_one(kind: Any, part: str) -> None:
    """In the third round of `lr_decay` 0.5 they are a quarter; FedNova's server step would be as long as claimed."""
    algorithm = kind(toy_model(), lr=0.1, epochs=1, batch_size=4, lr_decay=0.5)
    run = trained(algorithm, part, lambda _, leaf, t: leaf * 2 ** (t - 1))
    assert [{drop["client"] for drop in record["dropped"]} for record in run.history] == [set(), *[{LIAR}] * 3]


@pytest.mark.parametrize("link", [Loopback, Simulator])
def test_a_small_client_with_a_label_of_its_own_is_no_liar_for_its_squares(link: Any) -> None:
    """The others have learnt theirs: its squares are thousands of times as large, as squares of updates may be."""
    data = toy_data(examples=900)
    others, own = (found.nonzero().flatten().numpy() for found in (data.train_y != 2, data.train_y == 2))
    federation = fedge.Federation(data, [*np.array_split(others, 8), own[:4]])
    model = fedge.models.mlp(6, (12,), 3, seed=1)
    algorithm = fedge.FisherLBFGS(model, epochs=5, local_lr=0.1, damping=0.1)
    run = fedge.train(algorithm, federation, rounds=40, link=link(algorithm, federation))
    assert all(record["dropped"] == [] for record in run.history)
    assert run.history[-1]["test_accuracy"] > 0.8


def test_absurd_squares_count_for_the_limit_and_beyond_its_square_they_are_refused() -> None:
    algorithm = second_order()["lbfgs"]
    sent = (1e4, 2e4, 1e20)
    many = {c: trained(algorithm, "diagonal", lambda _, leaf, t, c=c: torch.full_like(leaf, c)) for c in sent}
    dropped = [[drop["client"] for record in run.history for drop in record["dropped"]] for run in many.values()]
    assert dropped == [[], [], [LIAR] * 4]
    assert close(many[1e4].params, many[2e4].params) < 1e-12  # both are the limit


# What together gives no state


@pytest.mark.parametrize("name", ["fedavg", "soap_server", "shampoo_server", "fedcm_spectral"])
def test_a_round_whose_uploads_give_no_state_is_skipped(name: str) -> None:
    """A cohort of one has nobody to compare with: its numbers overflow, and cost that round alone."""
    algorithm = first_order()[name]
    run = trained(algorithm, "delta", lambda _, leaf, t: torch.full_like(leaf, 1.7e308), rounds=8, cohort=1)
    skipped = [record for record in run.history if "skipped" in record]
    assert skipped
    assert all(
        "the new state is not finite" in record["skipped"] or "the server cannot compute" in record["skipped"]
        for record in skipped
    )
    assert all(torch.isfinite(leaf).all() for leaf in run.params.values())
    assert run.history[-1]["test_loss"] < run.history[0]["test_loss"]


def test_five_such_rounds_in_a_row_end_the_run() -> None:
    class Broken(fedge.FedAvg):
        def round(self, state):
            after = yield from super().round(state)
            return {**after, "params": {name: leaf * float("nan") for name, leaf in after["params"].items()}}

    algorithm = Broken(wide().model, lr=0.1, epochs=1)
    with pytest.raises(TooFewReplies, match="round 5: the new state is not finite"):
        fedge.train(algorithm, ragged(toy_data()), rounds=9)


def test_tiny_vectors_are_compared_without_a_division_by_zero() -> None:
    tiny = {"w": torch.full((4,), 1e-100, dtype=torch.float64)}
    assert compared(tiny, tiny) == (pytest.approx(1.0), 1.0)


def test_skipped_rounds_name_their_own_drops_once() -> None:
    """What a client of one round did is not said of it again in the next."""
    run = trained(first_order()["fedavg"], "delta", lambda _, leaf, t: leaf * float("nan"), rounds=8, cohort=1)
    for record in run.history:
        assert [drop["client"] for drop in record["dropped"]] == ([LIAR] if "skipped" in record else [])


@pytest.mark.parametrize("rule", [fedge.BoundedMean(), fedge.Median(), fedge.Krum(1, 3), fedge.ClippedMean(3.0)])
def test_a_robust_rule_also_limits_the_numbers_beside_a_model(rule: fedge.core.Combine) -> None:
    """FedNova's step is as long as the mean of what clients say of their steps, below the limit of a plain mean."""
    inner = fedge.FedNova(wide().model, lr=0.05, epochs=1, batch_size=4)
    honest = trained(fedge.Robust(inner, rule), "", lambda _, leaf, t: leaf)
    lied = trained(fedge.Robust(inner, rule), "steps", lambda _, leaf, t: 900 * leaf)
    assert lied.history[-1]["test_loss"] < 2 * honest.history[-1]["test_loss"]


def test_a_number_next_to_zero_does_not_make_liars_of_the_others() -> None:
    """Some accuracies are 0 at first: the smallest number that there is would be the median of all."""
    run = trained(first_order()["fedper"], "accuracy", lambda _, leaf, t: torch.full_like(leaf, 5e-324), rounds=2)
    assert [drop for record in run.history for drop in record["dropped"] if drop["client"] != LIAR] == []


def test_beside_zeros_one_that_is_next_to_zero_is_not_what_is_usual() -> None:
    """Nor is one that is huge."""
    for sizes, bad in (([0.0, 0.0, 0.0, 5e-324, 0.1, 0.2, 0.3], None), ([0.0, 0.0, 0.0, 5e-324, 0.1], None),
                       ([0.0, 0.0, 0.0, 0.1, 1e30], 1e30), ([0.0, 0.0, 1e30], 1e30)):  # fmt: skip
        usual = Usual()
        usual.note([sizes, [0.0] * len(sizes)])
        refused = [size for size in sizes if usual.beyond((size, 0.0), 1000.0) is not None]
        assert refused == ([] if bad is None else [bad])


class Converged(Loopback):
    """All but one have next to nothing left to learn; that one has, and a liar is still one."""

    liar: float

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        factor = {LIAR: 1.0, 5: self.liar}.get(client, 1e-9)
        for upload, _ in (one for uploads in answer.values() for one in uploads):
            upload["delta"] = {n: factor * leaf for n, leaf in upload["delta"].items()}
        return wire.encode(answer)


@pytest.mark.parametrize("name", ["wide", "small", "fedova"])
def test_who_still_learns_when_the_others_do_not_is_no_liar(name: str) -> None:
    algorithm = {"wide": wide(), "small": first_order()["fedavg"], "fedova": fedge.FedOVA(wide(2), classes=3)}[name]
    federation = ragged(toy_data())
    for liar, dropped in ((1e-9, set()), (1e6, {5})):
        link = Converged(algorithm, federation)
        link.liar = liar
        run = fedge.train(algorithm, federation, rounds=2, seed=0, link=link)
        assert {drop["client"] for record in run.history for drop in record["dropped"]} == dropped
