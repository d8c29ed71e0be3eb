"""Can this node work with that SuperLink, with these certificates and this key? Step by step, and why not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedge.deploy.bounded import Bounded
from fedge.deploy.envelope import short
from fedge.deploy.tls import CheckFailed, handshake, reach, speaks_http, speaks_tls, split

HEARTBEAT = 30.0  # seconds, as Flower's own nodes announce
ONLINE = "online"
UNREADABLE = (ValueError, RuntimeError)  # what Flower's clients make of an answer that is none


def check(address: str, ca: Path | None, key: Path | None) -> Iterator[str]:
    """One line for each thing that is fine; the first that is not is a CheckFailed.

    With a key the node is announced and withdrawn, as its start and its stop would do.
    """
    host, port = split(address)
    reach(host, port)
    yield f"{host}:{port} answers"
    if ca is None:
        _plain(host, port, key)
        yield "it speaks plain HTTP: nothing is encrypted, and nodes cannot prove who they are"
    else:
        end = handshake(host, port, ca)
        yield f"it speaks TLS, with a certificate of {ca} that is valid until {end}"
    _superlink(address, ca)
    if key is not None:
        private = read_key(key)
        if _lets_anybody_in(address, ca):
            raise CheckFailed(
                f"node authentication is off at {address}: whoever reaches it can join as a client, and a node with a "
                "key cannot; start the SuperLink with --enable-supernode-auth, then register the keys"
            )
        node = _announce(address, ca, private, key)
        yield f"it knows the key {key}, which no other node uses now (node id {node})"
    if _nodes(address, ca) is not None:
        yield (
            "note: the Control API can be reached from here; whoever reaches it can start runs. On a device it must "
            "not be: let the proxy pass /v1/fleet/ alone"
        )


def _superlink(address: str, ca: Path | None) -> None:
    """A SuperLink refuses the key of a stranger in its own way; anything else that answers is something else."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    key = ec.generate_private_key(ec.SECP384R1())
    with _fleet(address, ca, key) as (client, public):
        try:
            client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT))
            found = "HTTP 200"
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code in (httpx.codes.PRECONDITION_FAILED, httpx.codes.UNAUTHORIZED):
                return
            found = f"HTTP {code}"
        except (httpx.HTTPError, *UNREADABLE) as error:
            found = short(error)
    raise CheckFailed(
        f"{address} answers, but not as a SuperLink does ({found}): it is another program, or no SuperLink of Flower "
        "1.41 or later, or a proxy hides /v1/fleet/"
    )


@contextlib.contextmanager
def _fleet(address: str, ca: Path | None, key: ec.EllipticCurvePrivateKey) -> Iterator[tuple[Any, bytes]]:
    """Flower's client to the Fleet API that signs with this key, and the public key as Flower sends it."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    around = [NodeAuthHttpInterceptor(key, key.public_key()), Bounded(ca)]
    with FleetHttpClient.from_server_address(address, ca is None, _pem(ca), interceptors=around) as client:
        yield client, public_key_to_bytes(key.public_key())


def _plain(host: str, port: int, key: Path | None) -> None:
    if key is not None:
        raise CheckFailed("node keys need TLS: give --root-certificates too, or leave --key out")
    if not speaks_http(host, port):
        if speaks_tls(host, port):
            raise CheckFailed(
                f"{host}:{port} speaks TLS, plain HTTP is refused: give the node --root-certificates ca.crt "
                "in place of --insecure"
            )
        raise CheckFailed(f"{host}:{port} does not speak HTTP: is this the SuperLink's port?")


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise CheckFailed(f"there is no key {path}: `fedge deploy keys` makes one per node") from None
    except OSError as error:
        raise CheckFailed(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CheckFailed(f"{path} is not a private key in OpenSSH form ({error}): give node-N.key, not .pub") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CheckFailed(f"{path} is not an elliptic-curve key: make it with `ssh-keygen -t ecdsa -b 384`")
    return key


def _lets_anybody_in(address: str, ca: Path | None) -> bool:
    """Whether an unknown key can register itself; if so, it is withdrawn at once.

    A key made for this test: Flower never accepts a key again after it was withdrawn.
    """
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, UnregisterNodeFleetRequest

    with _fleet(address, ca, ec.generate_private_key(ec.SECP384R1())) as (client, public):
        try:
            found = client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
        except (httpx.HTTPError, *UNREADABLE):  # refused, as it should be; other problems show with the node's own key
            return False
        with contextlib.suppress(httpx.HTTPError, *UNREADABLE):
            client.UnregisterNode(UnregisterNodeFleetRequest(node_id=found.node_id))
    return True


def _announce(address: str, ca: Path | None, private: ec.EllipticCurvePrivateKey, path: Path) -> int:
    """Activate the node and deactivate it again; returns its id."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest

    with _fleet(address, ca, private) as (client, public):
        try:
            found = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT))
            client.DeactivateNode(DeactivateNodeRequest(node_id=found.node_id))
        except httpx.HTTPStatusError as error:
            raise CheckFailed(_refused(address, ca, public, path, error)) from None
        except (httpx.HTTPError, *UNREADABLE) as error:
            raise CheckFailed(f"{address} does not answer as a SuperLink does: {short(error)}") from None
        return int(found.node_id)


def _refused(address: str, ca: Path | None, public: bytes, path: Path, error: httpx.HTTPStatusError) -> str:
    code = error.response.status_code
    if code == httpx.codes.UNAUTHORIZED:
        return "the SuperLink does not accept the signature: the clocks differ by more than five minutes, set them"
    if code == httpx.codes.NOT_FOUND:
        return f"{address} has no Fleet API: it is no SuperLink of Flower 1.41 or later, or a proxy hides /v1/fleet/"
    if code != httpx.codes.PRECONDITION_FAILED:
        return f"the SuperLink refuses this node: HTTP {code}, {short(error.response.text)[:200]}"
    unregistered = (
        f"the SuperLink does not know the key {path}: on the server's machine, "
        f"`flwr supernode register {path.name}.pub`"
    )
    in_use = (
        f"another node that is online uses the key {path}: stop it, or give this one its own key (one that was killed "
        "counts as online for about a minute)"
    )
    nodes = _nodes(address, ca)
    if nodes is None:  # Flower's own answer is the same for both
        return f"either {unregistered}; or {in_use}. `flwr supernode list` on the server's machine tells which"
    return in_use if nodes.get(public) == ONLINE else unregistered


def _nodes(address: str, ca: Path | None) -> dict[bytes, str] | None:
    """Status by public key, from the Control API; None where it cannot be reached, as it should be on a device."""
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control.control_http_client import ControlHttpClient

    try:
        with ControlHttpClient.from_server_address(address, ca is None, _pem(ca), interceptors=[Bounded(ca)]) as client:
            found: Any = client.ListNodes(ListNodesRequest())
    except (httpx.HTTPError, *UNREADABLE):
        return None
    return {node.public_key: node.status for node in found.nodes_info}


def _pem(ca: Path | None) -> bytes | None:
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return None if ca is None else ca.read_bytes()
