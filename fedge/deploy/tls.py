"""Why a TLS connection fails: Flower only says "retrying"."""

from __future__ import annotations

import datetime
import socket
import ssl
from pathlib import Path

from cryptography import x509

SECONDS = 5.0
EXPIRED, NOT_YET, WRONG_NAME, WRONG_ADDRESS = 10, 9, 62, 64  # OpenSSL's verify codes


class CheckFailed(RuntimeError):
    """Why this node cannot work with that SuperLink, and what to do about it."""


def split(address: str) -> tuple[str, int]:
    """host:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise CheckFailed(f"the address is {address!r}, it must be HOST:PORT such as 192.0.2.7:8000, without https://")
    return host.strip("[]"), int(port)


def reach(host: str, port: int) -> None:
    """A TCP connection, or why there is none."""
    try:
        socket.create_connection((host, port), SECONDS).close()
    except socket.gaierror:
        raise CheckFailed(f"the name {host} is not known here: check its spelling, or use the address") from None
    except ConnectionRefusedError:
        raise CheckFailed(
            f"nothing listens on {host}:{port}: is the SuperLink running, and in front of it, on this port, the proxy "
            "that passes /v1/fleet/ alone? The SuperLink itself stays on 127.0.0.1"
        ) from None
    except TimeoutError:
        raise CheckFailed(
            f"{host}:{port} does not answer within {SECONDS:g} s: a firewall between here and there drops the packets"
        ) from None
    except OSError as error:
        raise CheckFailed(f"{host}:{port} cannot be reached: {error.strerror or error}") from None


def handshake(host: str, port: int, ca: Path) -> str:
    """The server's certificate is the CA's and for this host; returns when it ends."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except FileNotFoundError:
        raise CheckFailed(f"there is no file {ca}: copy the fleet's ca.crt to this machine") from None
    except (ssl.SSLError, OSError) as error:
        raise CheckFailed(f"{ca} is not a certificate in PEM form ({error}): copy the fleet's ca.crt") from None
    try:
        with socket.create_connection((host, port), SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        raise CheckFailed(_distrust(host, port, ca, error)) from None
    except (ssl.SSLError, OSError) as error:
        if speaks_http(host, port):
            raise CheckFailed(
                f"{host}:{port} speaks plain HTTP, not TLS: start the SuperLink with --ssl-ca-certfile, --ssl-certfile "
                "and --ssl-keyfile, and without --insecure"
            ) from None
        raise CheckFailed(f"{host}:{port} does not speak TLS: {error}; is this the SuperLink's port?") from None
    return f"{_certificate(host, port).not_valid_after_utc:%Y-%m-%d}"


def _distrust(host: str, port: int, ca: Path, error: ssl.SSLCertVerificationError) -> str:
    shown = _certificate(host, port)
    if error.verify_code in (WRONG_NAME, WRONG_ADDRESS):
        return (
            f"the certificate of {host}:{port} is for {_names(shown)}, not for {host}: use one of these names, or make "
            f"the keys again with --host {host}"
        )
    if error.verify_code in (EXPIRED, NOT_YET):
        now = datetime.datetime.now(datetime.UTC)
        span = f"{shown.not_valid_before_utc:%Y-%m-%d} to {shown.not_valid_after_utc:%Y-%m-%d}"
        return (
            f"the certificate of {host}:{port} is valid from {span}, and the clock here says {now:%Y-%m-%d %H:%M} UTC: "
            "set the clock, or make new keys"
        )
    issuer = shown.issuer.rfc4514_string()
    return (
        f"the certificate of {host}:{port} is not signed by {ca}: its issuer is {issuer!r}, but of another CA; copy "
        "the ca.crt that was made with the server's certificate to this node"
    )


def _certificate(host: str, port: int) -> x509.Certificate:
    """Whatever the server shows, trusted or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")


def _names(certificate: x509.Certificate) -> str:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name at all"
    return ", ".join(str(name.value) for name in found)


def speaks_http(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), SECONDS) as plain:
            plain.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            return plain.recv(16).startswith(b"HTTP/")
    except OSError:
        return False


def shows_certificate_of(host: str, port: int, ca: Path) -> bool:
    """Whether it is the server that this CA signed for, and not a stranger on its port."""
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with socket.create_connection((host, port), 1) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except OSError:
        return False
    return True


def speaks_tls(host: str, port: int) -> bool:
    try:
        _certificate(host, port)
    except (OSError, ValueError):
        return False
    return True
