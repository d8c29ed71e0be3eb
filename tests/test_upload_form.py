"""An upload in another form than its task's: other names cost its client its say, another order of them nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils import _pytree as pytree

import fedge
from fedge.core import Payload
from fedge.engine import Loopback
from fedge.engine.links import wire
from tests.cases import algorithms, close, ragged, toy_data, toy_model

FEDERATION = ragged(toy_data())
Edit = Callable[[list[Payload]], list[Payload]]  # the uploads of one row, by task


class Reworded(Loopback):
    """One client answers its own numbers in another form."""

    liar: int
    edit: Edit

    def client(self, client, at, ask, request):
        answer = wire.decode(super().client(client, at, ask, request))
        if client == self.liar:
            answer = {row: self._changed(uploads) for row, uploads in reversed(answer.items())}
        return wire.encode(answer)

    def _changed(self, uploads: list[Any]) -> list[Any]:
        changed = self.edit([upload for upload, _ in uploads])
        return [(upload, weight) for upload, (_, weight) in zip(changed, uploads, strict=True)]


def trained(algorithm: Any, edit: Edit, liar: int = 0, rounds: int = 3) -> fedge.Run:
    link = Reworded(algorithm, FEDERATION)
    link.edit, link.liar = edit, liar
    return fedge.train(algorithm, FEDERATION, rounds=rounds, seed=3, link=link)


def turned(uploads: list[Payload]) -> list[Payload]:
    """Parts and tensors from the last to the first."""
    return [{part: dict(reversed(leaves.items())) for part, leaves in reversed(one.items())} for one in uploads]


def names(run: fedge.Run) -> list[Any]:
    """The order of everything that the server keeps."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(run.state)[0]]


def small(**settings: Any) -> dict[str, Any]:
    return {"model": toy_model(), "epochs": 1, "batch_size": 4, **settings}


BY_ORDER = {
    "fedavg": lambda: fedge.FedAvg(**small(lr=0.02)),
    "server adam": lambda: fedge.FedAvg(**small(lr=0.02, server_optimiser="adam", carry_momentum=False)),
    "the last matrix": lambda: fedge.FedAvg(**small(lr=0.02, optimiser="spectral")),
    "the last bias": lambda: fedge.Calibrated(fedge.FedAvg(**small(lr=0.02)), every=2),
    "pairs": lambda: fedge.FisherLBFGS(**small(memory=2, curvature="product")),
    "pairs of the next round": lambda: fedge.FisherLBFGS(
        **small(memory=2, curvature="product", curvature_at="next"),
    ),
    "what a codec leaves alone": lambda: fedge.Compressed(fedge.FedAvg(**small(lr=0.02)), fedge.Quantise(8)),
    "gathered": lambda: fedge.Robust(fedge.FedAvg(**small(lr=0.02)), fedge.Median()),
    "by class": lambda: algorithms()["fedova_fedavg"],
    "controls": lambda: fedge.SCAFFOLD(**small(lr=0.02)),
}


@pytest.mark.parametrize("name", BY_ORDER)
def test_the_order_of_names_is_the_servers(name: str) -> None:
    """A client's order would stay in the state, and some work goes by it: the last layer, vectors as one."""
    algorithm = BY_ORDER[name]()
    run, honest = trained(algorithm, turned), trained(algorithm, lambda uploads: uploads)
    assert names(run) == names(honest)
    assert close(run.params, honest.params) == 0
    assert [record["dropped"] for record in run.history] == [[], [], []]


def more(part: str, place: int = -1) -> Edit:
    """A part without tensors beside those of one task, the last or the first."""

    def edit(uploads: list[Payload]) -> list[Payload]:
        changed = list(uploads)
        changed[place] = {**uploads[place], part: {}} if place else {part: {}, **uploads[place]}
        return changed

    return edit


def fewer(uploads: list[Payload]) -> list[Payload]:
    return [{part: {} for part in one} for one in uploads]


def numbered(uploads: list[Payload]) -> list[Payload]:
    """Names that are no strings."""
    return [{part: dict(enumerate(leaves.values())) for part, leaves in one.items()} for one in uploads]


def nested(uploads: list[Payload]) -> list[Payload]:
    """The slash elsewhere: the same names, if part and tensor are joined by one."""
    return [{f"{part}/{n}": {"": leaf} for part, x in one.items() for n, leaf in x.items()} for one in uploads]


FORMS: dict[str, tuple[Edit, str]] = {
    "one part more": (more("evil"), "upload has the part 'evil' too many or too few"),
    "one part more, first": (more("evil", 0), "upload has the part 'evil' too many or too few"),
    "a number": (more(7), "upload has the part '7' too many or too few"),  # type: ignore[arg-type]
    "empty parts": (fewer, "too many or too few"),
    "numbers": (numbered, "too many or too few"),
    "nested": (nested, "too many or too few"),
}
KINDS = {
    "mean": lambda: fedge.FedAvg(**small(lr=0.1)),
    "stack": lambda: fedge.Robust(fedge.FedAvg(**small(lr=0.1)), fedge.Median()),
    "stream": lambda: fedge.Robust(fedge.FedAvg(**small(lr=0.1)), fedge.BoundedMean()),
    "gather": lambda: algorithms()["fedper"],
    "stack by class": lambda: fedge.Robust(algorithms()["fedova_fedavg"], fedge.Median()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_other_names_cost_their_client_alone(form: str, kind: str) -> None:
    edit, reason = FORMS[form]
    for liar in (0, 4):
        run = trained(KINDS[kind](), edit, liar, rounds=2)
        dropped = [drop for record in run.history for drop in record["dropped"]]
        assert {drop["client"] for drop in dropped} == {liar}
        assert all(reason in drop["reason"] for drop in dropped)
        assert not any("skipped" in record for record in run.history)


@pytest.mark.parametrize("liar", [0, 4])
def test_one_task_does_not_bring_the_parts_of_another(liar: int) -> None:
    """An empty part under the name of the other task's took the place of the sums, or counted in their weight."""
    run = trained(fedge.FisherLBFGS(**small()), more("grad"), liar)
    dropped = [drop for record in run.history for drop in record["dropped"]]
    assert {drop["client"] for drop in dropped} == {liar}
    assert {drop["reason"] for drop in dropped} == {"upload has the part 'grad' too many or too few"}
