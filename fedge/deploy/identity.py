"""Which client a node may be: a map from its key to its client.

Flower lets in every node whose key is registered, and believes what it says of itself. Here a key belongs to a client:
as the files `node-N.key.pub` say where the server has them, or else as whoever comes first says, for the whole run. A
client that was there with a key is that key's: no other key takes its place while its node is away.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as to

FILE = re.compile(r"node-(\d+)\.key\.pub")
SHOWN = 16  # characters of a fingerprint that a message shows


class IdentityError(ValueError):
    """Public keys that cannot be read, and what to do."""


def fingerprint(key: bytes) -> str:
    """Of a public key as Flower has it."""
    return hashlib.sha256(key).hexdigest()


def read_keys(folder: Path | str) -> dict[str, int]:
    """Clients by fingerprint, from the files node-N.key.pub of a folder."""
    found: dict[str, int] = {}
    files = sorted(path for path in Path(folder).glob("node-*.key.pub") if FILE.fullmatch(path.name))
    if not files:
        raise IdentityError(f"there is no node-N.key.pub in {folder}: copy the public keys there")
    for path in files:
        try:
            key = to.load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise IdentityError(f"{path} is not a public key in OpenSSH form: {error}") from None
        pem = key.public_bytes(to.Encoding.PEM, to.PublicFormat.SubjectPublicKeyInfo)
        name = FILE.fullmatch(path.name)
        assert name is not None
        if fingerprint(pem) in found:
            raise IdentityError(f"{path} has the key of client {found[fingerprint(pem)]} too: give each its own")
        found[fingerprint(pem)] = int(name[1])
    return found


class Identities:
    """Clients by key: given, or else as they are seen first. A node without a key goes by its number in this run."""

    def __init__(self, given: Mapping[str, int] | None = None) -> None:
        self.given = given
        self.seen: dict[str, int] = {}
        self._keys: dict[int, str] = {}

    def met(self, node: int, key: bytes) -> None:
        if key:
            self._keys[node] = fingerprint(key)

    def key(self, node: int) -> str:
        return self._keys.get(node, f"node {node}")

    def owner(self, node: int) -> int | None:
        """The client that a node's key belongs to."""
        return (self.seen if self.given is None else self.given).get(self.key(node))

    def refusal(self, node: int, client: int) -> str | None:
        """Why a node cannot be this client; None if it can."""
        own = self.owner(node)
        if own is None and self.given is not None:
            shown = self.key(node)[:SHOWN]
            return (
                f"its key {shown}... is of no client: put its node-N.key.pub where the server has those of the others"
            )
        if own is not None and own != client:
            return (
                f"it says that it is client {client}, but its key is client {own}'s: start it with partition-id={own}"
            )
        if own is None and client in self.settings().values():
            return (
                f"it says that it is client {client}, which was here with another key: give the server the keys of all "
                "nodes (keys), or start another run"
            )
        return None

    def accept(self, node: int, client: int) -> None:
        if self.given is None:
            self.seen[self.key(node)] = client

    def settings(self) -> dict[str, int]:
        """What holds after a restart of the server too: keys, not numbers of nodes."""
        return {key: client for key, client in self.seen.items() if not key.startswith("node ")}

    def restore(self, seen: Mapping[str, int]) -> None:
        """What held before comes before what was said since: of two keys of one client, the older stays."""
        taken = set(seen.values())
        self.seen = {key: client for key, client in self.seen.items() if client not in taken} | dict(seen)
