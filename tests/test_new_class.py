"""A class that appears during training: the benchmark's federations, its three ways, and its page."""

from __future__ import annotations

import torch

import fedge
from benchmarks.new_class import measure, page


def test_the_page_says_what_is_stored() -> None:
    """If not: `python -m benchmarks.new_class --page`."""
    text = page.PAGE.read_text("utf-8")
    assert page.text(text, page.lines()) == text
    assert page.PICTURE.is_file()


def test_the_clients_are_the_same_but_for_the_new_class() -> None:
    data = fedge.data.load("digits")
    before, after = measure.federations(data, 0)
    for k in range(after.clients):
        whole = data.train_x[after.examples(k)]
        is_old = data.train_y[after.examples(k)] != measure.NEW
        assert torch.equal(before.data.train_x[before.examples(k)], whole[is_old])
    assert int(before.data.train_y.max()) == measure.NEW - 1


def test_every_way_goes_on_from_what_it_had() -> None:
    """Eight rounds and one: what was learnt of the old classes is still there when the new one appears."""
    data = fedge.data.load("digits")
    for name in measure.METHODS:
        line = measure.follow(name, 0, data, (8, 1))
        assert [len(line[part]) for part in ("old", "new", "bytes")] == [9, 9, 9]
        assert line["new"][:8] == [0] * 8, "nobody has seen it"
        assert line["old"][8] > line["old"][0] + 0.2, "a fresh network would begin anew"


def test_rounds_are_counted_from_when_the_class_appears() -> None:
    line = {"new": [0.0] * measure.BEFORE + [0.1, 0.6, 0.9]}
    assert [page.rounds_to(line, target) for target in (0.5, 0.8, 0.95)] == [2, 3, float("inf")]
