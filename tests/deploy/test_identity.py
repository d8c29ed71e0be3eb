"""A key belongs to a client: whoever has it cannot say that it is another one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as to
from flwr.proto.node_pb2 import NodeInfo

import fedge
from fedge.deploy import FlowerLink, Roster, client_app
from fedge.deploy.identity import IdentityError, fingerprint, read_keys
from fedge.deploy.keys import make_keys
from tests.deploy.test_link import ALGORITHM, CLIENTS, FEDERATION, Yard, load, more, rounds_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("keys"), ["127.0.0.1"], CLIENTS + 1).folder


def pem(folder: Path, number: int) -> bytes:
    key = to.load_ssh_public_key((folder / f"node-{number}.key.pub").read_bytes())
    return key.public_bytes(to.Encoding.PEM, to.PublicFormat.SubjectPublicKeyInfo)


class Keyed(Yard):
    """Node 100 + N has key N; who it says it is, is its own affair."""

    def __init__(self, folder: Path, partitions: Iterable[Any], keys: Iterable[int]) -> None:
        super().__init__(client_app(ALGORITHM, load), partitions)
        self.keys = {100 + place: pem(folder, key) for place, key in enumerate(keys)}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.get_node_ids()]


def link_to(yard: Yard, said: list[str], keys: dict[str, int] | None) -> FlowerLink:
    roster = Roster(yard, CLIENTS, [""], said.append, keys=keys)
    roster.wait(1, 0, 5)
    return FlowerLink(ALGORITHM, FEDERATION, yard, roster, deadline=2.0)


def test_the_files_say_which_key_is_whose(folder: Path) -> None:
    assert read_keys(folder) == {fingerprint(pem(folder, number)): number for number in range(CLIENTS + 1)}


def test_files_that_are_no_keys(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(IdentityError, match=r"there is no node-N\.key\.pub in"):
        read_keys(tmp_path)
    (tmp_path / "node-0.key.pub").write_text("not a key")
    with pytest.raises(IdentityError, match=r"node-0\.key\.pub is not a public key in OpenSSH form"):
        read_keys(tmp_path)
    for name in ("node-0.key.pub", "node-1.key.pub"):
        (tmp_path / name).write_bytes((folder / "node-0.key.pub").read_bytes())
    with pytest.raises(IdentityError, match=r"node-1\.key\.pub has the key of client 0 too"):
        read_keys(tmp_path)


@pytest.mark.parametrize("first", [True, False], ids=["impostor first", "impostor last"])
def test_an_impostor_is_refused_and_named(folder: Path, first: bool) -> None:
    """A node with client 1's key says that it is client 0, before and after the real one does."""
    said: list[str] = []
    order = [1, 0] if first else [0, 1]
    yard = Keyed(folder, [0, 0, *range(2, CLIENTS)], [*order, *range(2, CLIENTS)])
    link = link_to(yard, said, read_keys(folder))
    impostor = 100 + order.index(1)
    words = "it says that it is client 0, but its key is client 1's: start it with partition-id=1"
    assert f"node {impostor} is left out: {words}" in said
    run = more(link)
    (drop,) = rounds_of(run)[0]
    assert (drop["client"], drop["reason"]) == (1, f"node {impostor} is left out: {words}")
    assert link.roster.nodes[0] == 100 + order.index(0)


def test_a_key_of_nobody_is_refused(folder: Path) -> None:
    said: list[str] = []
    yard = Keyed(folder, range(CLIENTS), [CLIENTS, *range(1, CLIENTS)])
    known = {key: client for key, client in read_keys(folder).items() if client < CLIENTS}
    link = link_to(yard, said, known)
    assert any(f"its key {fingerprint(pem(folder, CLIENTS))[:16]}... is of no client" in line for line in said)
    assert [drop["client"] for drop in rounds_of(more(link))[0]] == [0]


def test_without_files_a_key_stays_with_the_client_it_was_first(folder: Path, tmp_path: Path) -> None:
    """In one run, and after the server was started again."""
    said: list[str] = []
    yard = Keyed(folder, range(CLIENTS), range(CLIENTS))
    link = link_to(yard, said, None)
    out = tmp_path / "run"
    fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link, out=out)
    del yard.contexts[100]  # client 0 goes, and client 1 says that it is client 0
    yard.join(0, node=101)
    again = link_to(yard, said, None)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=3, seed=0, link=again, out=out, resume=True)
    reasons = {drop["client"]: drop["reason"] for drop in rounds_of(run)[-1]}
    assert reasons[1].endswith("it says that it is client 0, but its key is client 1's: start it with partition-id=1")
    assert reasons[0] == "its node is not connected"


def test_without_files_no_other_key_becomes_a_client_whose_node_is_away(folder: Path, tmp_path: Path) -> None:
    """Client 0 was here with its key; while it is away a node with a key that nobody knows says that it is client 0."""
    said: list[str] = []
    yard = Keyed(folder, range(CLIENTS), range(CLIENTS))
    link = link_to(yard, said, None)
    fedge.train(ALGORITHM, FEDERATION, rounds=1, seed=0, link=link, out=tmp_path / "run")
    del yard.contexts[100]
    yard.join(0, node=150)
    yard.keys[150] = pem(folder, CLIENTS)
    again = link_to(yard, said, None)
    run = fedge.train(ALGORITHM, FEDERATION, rounds=3, seed=0, link=again, out=tmp_path / "run", resume=True)
    reasons = {drop["client"]: drop["reason"] for drop in rounds_of(run)[-1]}
    assert "it says that it is client 0, which was here with another key" in reasons[0]
    yard.join(0, node=100)  # and its own key is welcome
    assert rounds_of(more(again))[-1] == []
