"""A link around a link is an ordinary class, and training sees no difference."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import fedge
from fedge.core import At
from fedge.engine import Around, BaseLink, Loopback, Simulator
from tests import lossy
from tests.cases import algorithms, close, ragged, toy_data
from tests.lossy import Lossy, Recording, Slow


@pytest.mark.parametrize("kind", [Simulator, Loopback])
@pytest.mark.parametrize("name", ["feddane", "fedova_compressed", "sharing_fedova"])
def test_a_bare_wrapper_changes_nothing(name: str, kind, tmp_path: Path) -> None:
    algorithm, federation = algorithms()[name], ragged(toy_data())
    plain = fedge.train(algorithm, federation, rounds=4, cohort=5, seed=3, link=kind(algorithm, federation))
    out = {"out": tmp_path / "a", "observe": fedge.Observe(checkpoint_every=2)}
    for rounds in (2, 4):
        link = Around(Slow(kind(algorithm, federation), 0.0))
        found = fedge.train(
            algorithm, federation, rounds=rounds, cohort=5, seed=3, link=link, resume=rounds == 4, **out
        )
    assert close(plain.params, found.params) == 0
    assert plain.ledger.rows == found.ledger.rows
    assert plain.memory_bytes == found.memory_bytes
    assert found.history[-1]["delay"] == 0.0


def test_lost_clients_are_named_and_leave_the_round() -> None:
    algorithm, federation = algorithms()["feddane"], ragged(toy_data())
    cohort = fedge.train(algorithm, federation, rounds=1, cohort=5, seed=3).history[0]["cohort"]
    link = Recording(Lossy(Simulator(algorithm, federation), {(1, "gradient", cohort[1]), (1, "solve", cohort[3])}))
    run = fedge.train(algorithm, federation, rounds=1, cohort=5, seed=3, link=link)
    assert [(d["client"], d["task"], d["reason"]) for d in run.history[0]["dropped"]] == [
        (cohort[1], "gradient", "lost on the way"),
        (cohort[3], "solve", "lost on the way"),
    ]
    left = [client for client in cohort if client != cohort[1]]
    assert link.seen == [(At(3, 1, 0), ("gradient",), cohort), (At(3, 1, 1), ("solve",), left)]
    rest = [client for client in left if client != cohort[3]]
    assert [row.clients for row in run.ledger] == [len(left), len(rest)]


def test_a_wrapper_passes_on_all_that_a_link_has() -> None:
    """A method that came to the base and not to the wrapper would be lost on the way."""
    own = {name for name, thing in vars(BaseLink).items() if inspect.isfunction(thing)}
    assert own <= set(vars(Around))


def test_links_around_links_stay_short() -> None:
    for kind in (Lossy, Slow, Recording):
        assert len(inspect.getsourcelines(kind)[0]) <= 30
    assert inspect.getsource(lossy).count("\n") < 70
