"""`--min-replies` that no round can have is refused before a fleet is started."""

from __future__ import annotations

import pytest

from fedge.deploy.replies import check_replies
from fedge.engine.uploads.checks import TooFewReplies, require
from fedge.experiment import ExperimentError, build, parse

FILE = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 10},
    "model": {"name": "logistic"},
    "algorithm": [{"name": "fedavg"}],
}
LATE = {"algorithm": [{"name": "fedbuff", "inner": {"name": "fedavg"}, "buffer": 2}], "edge": {"spread": 10}}


@pytest.mark.parametrize(
    ("train", "more", "most", "said"),
    [
        ({}, {}, 10, "10 clients at most answer in a round: lower it$"),
        ({"cohort": 4}, {}, 4, r"4 clients at most answer in a round: lower it, or raise cohort in \[train\]"),
        ({"cohort": 4, "sampling": "poisson"}, {}, 10, "10 clients at most"),
        ({"cohort": 4}, LATE, 10, "10 clients at most"),
    ],
)
def test_more_replies_than_clients_are_asked(
    train: dict[str, object], more: dict[str, object], most: int, said: str
) -> None:
    setup = build(parse(FILE | {"train": {"rounds": 2} | train} | more))
    check_replies(most, setup)
    with pytest.raises(ExperimentError, match=f"min-replies is {most + 1}, but {said}"):
        check_replies(most + 1, setup)


@pytest.mark.parametrize(("good", "said"), [(0, r"\(no client answered\)"), (2, r"\(no other client answered\)")])
def test_who_answered_is_said(good: int, said: str) -> None:
    with pytest.raises(TooFewReplies, match=f"good uploads of {good} clients, 99 needed {said}: lower"):
        require(good, 99, "train", [])
