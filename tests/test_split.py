"""Where a round's time goes: the sections are complete, exclusive and attributed to whom they belong."""

from __future__ import annotations

import time

import pytest
import torch

from fedge.bench import WORKLOADS
from fedge.bench.split import Share, around, split
from fedge.bench.timing import Round
from fedge.core import Ask
from fedge.engine import Simulator
from fedge.engine.clients.directory import Jobs
from fedge.engine.uploads import checks
from fedge.engine.uploads.intake import Intake
from fedge.engine.uploads.streaming import Sums


def test_a_slow_section_is_found_and_the_sum_is_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Round(WORKLOADS["B"], "cpu")
    step()
    reply = Sums.reply

    def slow(self: Sums) -> object:
        time.sleep(0.05)
        return reply(self)

    monkeypatch.setattr(Sums, "reply", slow)
    begin = time.perf_counter()
    found = {one.section: one for one in split(step, "cpu", 2)}
    whole = 1e3 * (time.perf_counter() - begin) / 2
    assert 50 <= found["reply"].host < whole
    assert sum(one.host for one in found.values()) == pytest.approx(whole, rel=0.2)
    assert {name for name, one in found.items() if one.clients} == {"draws", "gather", "start and finish", "steps", "fold"}  # fmt: skip # noqa: E501
    assert Sums.reply is slow, "everything is as it was"


def test_what_is_around_is_a_share_of_the_round() -> None:
    shares = [Share("steps", 3.0, 6.0, True), Share("reply", 1.0, 2.0, False), Share("uploads", 1.0, 0.0, False)]
    assert around(shares) == 0.25
    assert around([one._replace(gpu=None) for one in shares]) == 0.4


def test_the_host_waits_once_for_the_uploads_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every tolist, item or bool waits for all that is queued."""
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "nonzero"):
        method = getattr(torch.Tensor, name)

        def counting(self: torch.Tensor, *args: object, _name: str = name, _method=method) -> object:
            waits.append(_name)
            return _method(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    algorithm, federation = WORKLOADS["B"].build(False)
    link = Simulator(algorithm, federation)
    clients = torch.arange(8)
    tasks = [link.tasks["train"]]
    jobs = Jobs(clients, torch.zeros_like(clients), torch.zeros_like(clients))
    intake = link.intake(Ask(("train",), {}), tasks, jobs)
    uploads = {"train": ({"delta": {"w": torch.randn(8, 100)}}, torch.full((8,), 14.0))}
    waits.clear()
    assert intake.take(jobs, jobs.positions, uploads) == ([], [])
    assert waits == ["tolist"]
    assert isinstance(intake, Intake)
    assert int(intake.total.reply().clients) == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_the_largest_magnitude_of_every_job(dtype: torch.dtype) -> None:
    leaf = (torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    wanted = [float(one.double().abs().max()) for one in leaf]
    assert checks.largest(leaf).tolist() == wanted
    assert checks.largest(leaf[:, 0, 0]).tolist() == [abs(float(one)) for one in leaf[:, 0, 0]]
    if dtype.is_floating_point:
        leaf[1, 2, 3], leaf[2, 0, 0] = torch.nan, -torch.inf
        found = checks.largest(leaf)
        assert found.isnan().tolist() == [False, True, False, False, False]
        assert found[2] == torch.inf
