"""Certificates and node keys: a CA, the SuperLink's certificate, and one key pair per node.

Flower's SuperNodes trust the CA and prove who they are with their own key. The CA's key signs and is then no longer
needed: keep it off every machine that is online.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as to
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedge.checks import at_least_one

DAYS, MOST_DAYS = 365, 36_500
MOST_NODES = 100_000
LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")  # of a host name, between its dots


class KeysError(ValueError):
    """Keys that cannot be made, and why."""


@dataclass(frozen=True)
class Keys:
    """Where everything is: what the server needs, what each node needs, what belongs on no machine that is online."""

    folder: Path
    nodes: int

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    def node(self, number: int) -> Path:
        """The private key of a node."""
        return self.folder / f"node-{number}.key"

    def public(self, number: int) -> Path:
        return self.folder / f"node-{number}.key.pub"

    def files(self) -> Iterator[Path]:
        """All that is ever written, secret or not."""
        yield from (self.ca, self.ca_key, self.certificate, self.server_key)
        for number in range(self.nodes):
            yield from (self.node(number), self.public(number))


def make_keys(
    folder: Path | str, hosts: Sequence[str], nodes: int, days: int = DAYS, *, keep_ca_key: bool = True
) -> Keys:
    """Write a CA, a server certificate for these names and addresses, and the nodes' key pairs. Overwrites nothing.

    The CA's key is written only if it is to sign again.
    """
    keys = Keys(Path(folder), nodes)
    at_least_one("nodes", nodes)
    at_least_one("days", days)
    if days > MOST_DAYS:
        raise KeysError(f"days is {days}, it must be at most {MOST_DAYS}, a hundred years: make new keys before")
    if nodes > MOST_NODES:
        raise KeysError(f"nodes is {nodes}, it must be at most {MOST_NODES:,}")
    names = [_name(host) for host in hosts]
    if not names:
        raise KeysError("no host was given: name the address or the host name under which nodes reach the SuperLink")
    _check_folder(keys)
    written: list[Path] = []
    try:
        keys.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, content in _contents(keys, names, days, keep_ca_key):
            _write_new(path, content, 0o600 if path.suffix == ".key" else 0o666)
            written.append(path)
    except BaseException as error:
        for path in written:  # half of the keys are of no use, and would stand in the way of the next attempt
            path.unlink()
        if isinstance(error, OSError):
            raise KeysError(f"cannot write to {keys.folder}: {error.strerror}; choose another folder") from error
        raise
    return keys


def _check_folder(keys: Keys) -> None:
    """Nothing that is there is overwritten, be it a link to nowhere; and nobody else can put keys beside these."""
    for file in keys.files():
        if os.path.lexists(file):
            raise KeysError(f"{file} exists: keys are never overwritten, choose another folder")
    if os.name == "posix" and keys.folder.is_dir() and keys.folder.stat().st_mode & stat.S_IWOTH:
        raise KeysError(
            f"everybody may write to {keys.folder}, and could put keys there: run `chmod o-w {keys.folder}`, or choose "
            "another folder"
        )


def _contents(keys: Keys, names: list[x509.GeneralName], days: int, keep_ca_key: bool) -> Iterator[tuple[Path, bytes]]:
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca = _ca(ca_key, days)
    if keep_ca_key:
        yield keys.ca_key, _pem(ca_key)
    yield keys.server_key, _pem(server_key)
    yield keys.ca, ca.public_bytes(to.Encoding.PEM)
    yield keys.certificate, _server(server_key, names, ca, ca_key, days).public_bytes(to.Encoding.PEM)
    for number in range(keys.nodes):  # what `ssh-keygen -t ecdsa -b 384` writes
        key = ec.generate_private_key(ec.SECP384R1())
        yield keys.node(number), key.private_bytes(to.Encoding.PEM, to.PrivateFormat.OpenSSH, to.NoEncryption())
        told = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH)
        yield keys.public(number), told + b"\n"


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host.isascii() and (plain := _ascii(host)) is not None:
        raise KeysError(f"host is {host!r}, it must be as certificates spell it: --host {plain}")
    labels = host.split(".")
    if len(host) > 253 or not all(LABEL.fullmatch(part) for part in labels) or labels[-1].isdigit():
        raise KeysError(
            f"host is {host!r}, it must be an address such as 192.0.2.7 or a name such as fleet.example.org"
        )
    return x509.DNSName(host)


def _ascii(host: str) -> str | None:
    """An international name as it is written in ASCII (IDNA 2003, which is what Python has)."""
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return None


def _ca(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedge fleet CA")])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    builder = _begun(subject, subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False).sign(
        key, hashes.SHA384()
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedge SuperLink")])
    builder = _begun(subject, ca.subject, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return builder.add_extension(issuer, critical=False).sign(ca_key, hashes.SHA384())


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    early = now - datetime.timedelta(hours=1)  # clocks of devices differ
    return builder.not_valid_before(early).not_valid_after(now + datetime.timedelta(days=days))


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    text: bytes = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())
    return text


def write_secret(path: Path, content: bytes) -> None:
    """Readable by its owner alone, from the first byte."""
    _write_new(path, content, 0o600)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Never into what is there, nor through a link; all of it or nothing."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink()
        raise
