"""The stricter rule for divergence, on curves that it must and must not refuse."""

from __future__ import annotations

import pytest

from benchmarks.paper.strict import fell
from benchmarks.paper.tables import is_good

STEADY = [0.8] * 200
CURVES = {
    "steady": (STEADY, False),
    "young": ([0.8, 0.1] * 20 + [0.8] * 160, False),  # swings up to round 40
    "small dip": ([0.8] * 100 + [0.73] + [0.8] * 99, False),
    "dip": ([0.8] * 100 + [0.71] + [0.8] * 99, True),
    "dip at round 50": ([0.8] * 49 + [0.1] + [0.8] * 150, False),
    "dip at round 51": ([0.8] * 50 + [0.1] + [0.8] * 149, True),
    "fading": ([0.8] * 150 + [0.8 - 0.001 * number for number in range(50)], True),
    "fading a little": ([0.8] * 150 + [0.8 - 0.0005 * number for number in range(50)], False),
    "at the end": ([0.8] * 199 + [0.1], True),
    "with gaps": ([None, 0.8] * 100, False),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_rule(name: str) -> None:
    curve, expected = CURVES[name]
    assert fell({"failed": None, "test_accuracy": curve}) == expected
    assert fell({"failed": "no upload is finite", "test_accuracy": curve})


def test_it_judges_the_experiments_that_began_with_it() -> None:
    line = {"failed": None, "test_accuracy": CURVES["dip"][0], "rounds": 200}
    assert not is_good({**line, "experiment": "splits"})
    assert is_good({**line, "experiment": "noniid"}), "the rule of the earlier ones"
