"""Who does not belong is kept out, and `fedge deploy check` says why; with a real SuperLink, TLS and node keys."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from fedge import toml
from fedge.cli.app import app
from fedge.deploy.bundle import project
from fedge.deploy.fleet import Fleet, FleetError
from fedge.deploy.keys import Keys, KeysError, make_keys
from fedge.deploy.local import follow
from fedge.deploy.process import Process, free_port, listens, stop_all
from fedge.experiment import Watch
from tests.deploy.processes import Marked, program

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Marked:
    return Marked(tmp_path_factory.mktemp("refusals"))


@pytest.fixture(scope="module")
def fleet(here: Marked) -> Iterator[Fleet]:
    """One node that is online, and keys of a second that is registered and not started."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in here.env().items():
            patch.setenv(name, value)
        fleet = Fleet(here.folder / "fleet", 2)
        try:
            fleet.start_parts(online=1)
            end = time.monotonic() + 60
            while "SuperNode ID" not in (fleet.folder / "logs/node-0.log").read_text():
                assert time.monotonic() < end
                time.sleep(0.2)
            yield fleet
        finally:
            fleet.stop()


@pytest.fixture(scope="module")
def strangers(here: Marked) -> Keys:
    """A CA and a node key that have nothing to do with the fleet."""
    return make_keys(here.folder / "strangers", ["127.0.0.1"], 1)


def check(here: Marked, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, in this process: torch need not be loaded again."""
    found = CliRunner().invoke(app, ["deploy", "check", *map(str, words)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return subprocess.CompletedProcess([], found.exit_code, found.stdout, found.stderr)


def refused(done: subprocess.CompletedProcess[str], pattern: str) -> None:
    print(done.stderr.strip())
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(pattern, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: ")
    assert "This node can join" not in done.stdout


def test_a_node_that_belongs_is_told_so(here: Marked, fleet: Fleet) -> None:
    keys = fleet.known_keys
    for _ in range(2):  # the check leaves the node as it was: it can be checked, and started, again
        done = check(here, fleet.address, "--root-certificates", keys.ca, "--key", keys.node(1))
        assert done.returncode == 0, done.stderr
        assert "This node can join." in done.stdout
        assert "which no other node uses now" in done.stdout
        assert "note: the Control API can be reached from here" in done.stdout


def test_a_wrong_ca(here: Marked, fleet: Fleet, strangers: Keys) -> None:
    done = check(here, fleet.address, "--root-certificates", strangers.ca, "--key", fleet.known_keys.node(1))
    refused(done, r"is not signed by .*strangers/ca\.crt.*copy the ca\.crt")


def test_plain_http_to_a_superlink_with_tls(here: Marked, fleet: Fleet) -> None:
    refused(check(here, fleet.address, "--insecure"), "speaks TLS, plain HTTP is refused.*--root-certificates")


def test_tls_to_a_superlink_with_plain_http(here: Marked, fleet: Fleet) -> None:
    port = free_port()
    command = [program("flower-superlink"), "--insecure", "--isolation", "process", "--port", str(port)]
    plain = Process("plain", command, here.env(), here.folder / "plain.log")
    try:
        end = time.monotonic() + 60
        while not listens(port):
            assert plain.alive, plain.last_words()
            assert time.monotonic() < end
            time.sleep(0.2)
        ca = fleet.known_keys.ca
        refused(
            check(here, f"127.0.0.1:{port}", "--root-certificates", ca), "speaks plain HTTP, not TLS.*--ssl-certfile"
        )
        done = check(here, f"127.0.0.1:{port}", "--insecure")
        assert done.returncode == 0
        assert "nothing is encrypted" in done.stdout
    finally:
        stop_all([plain])


def test_a_superlink_without_node_authentication(here: Marked, fleet: Fleet, strangers: Keys) -> None:
    """The key is not what is wrong; nor does such a SuperLink, without a secret, ask who fetches its runs."""
    keys, port = fleet.known_keys, free_port()
    command = [program("flower-superlink"), "--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
    files = ["--ssl-ca-certfile", keys.ca, "--ssl-certfile", keys.certificate, "--ssl-keyfile", keys.server_key]
    trusting = Process("trusting", [*command, *files], here.env(), here.folder / "trusting.log")
    try:
        here.wait_for(lambda: listens(port) or not trusting.alive, 60)
        address = f"127.0.0.1:{port}"
        for _ in range(2):
            done = check(here, address, "--root-certificates", keys.ca, "--key", strangers.node(0))
            refused(done, "node authentication is off at .*whoever reaches it can join.*--enable-supernode-auth")
        fetch_a_run(address, keys)
    finally:
        stop_all([trusting])


def fetch_a_run(address: str, keys: Keys) -> None:
    """As a SuperExec does, but without its secret."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient

    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    with RuntimeHttpClient.from_server_address(address, False, keys.ca.read_bytes(), interceptors=[version]) as client:
        client.AcquireTask(AcquireTaskRequest())


def test_only_the_fleets_own_superexec_fetches_runs(fleet: Fleet) -> None:
    assert (fleet.folder / "keys/superexec.secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        fetch_a_run(fleet.address, fleet.known_keys)


def test_the_database_is_the_users_own(fleet: Fleet) -> None:
    assert (fleet.folder / "superlink.db").stat().st_mode & 0o077 == 0


def test_a_server_app_that_fails_at_once_is_shown(here: Marked, fleet: Fleet) -> None:
    """Its SuperExec throws its output away; the stand-in keeps it, and `fedge deploy local` says it."""
    folder = here.folder / "broken"
    (folder / "fleet").mkdir(parents=True)
    (folder / "fleet/__init__.py").write_text("")
    (folder / "fleet/app.py").write_text("import no_such_sensor\n\nclient = server = None\n")
    (folder / "pyproject.toml").write_text(toml.dump(project("fedge-broken")))
    run = fleet.submit(folder, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedge.deploy.local.SILENCE", 1.0)
        with pytest.raises(FleetError, match=r"ended without a message \(finished.*no_such_sensor"):
            follow(fleet, run, Watch(), lambda: False)
    assert "No module named 'no_such_sensor'" in (fleet.folder / "logs/serverapp.log").read_text()


def test_the_fleet_has_no_key_of_its_ca(fleet: Fleet) -> None:
    assert not fleet.known_keys.ca_key.exists()


def test_a_port_that_was_taken_meanwhile(here: Marked, fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        late = Fleet(here.folder / "late", 1, warm=False)
        late.port = stranger.getsockname()[1]
        with pytest.raises(FleetError, match=f"another program has taken port {late.port}"), late:
            pass
    assert not late.processes


def test_an_unregistered_key(here: Marked, fleet: Fleet, strangers: Keys) -> None:
    done = check(here, fleet.address, "--root-certificates", fleet.known_keys.ca, "--key", strangers.node(0))
    refused(done, r"does not know the key .*strangers/node-0\.key.*flwr supernode register node-0\.key\.pub")


def test_a_second_node_with_a_live_nodes_key(here: Marked, fleet: Fleet) -> None:
    done = check(here, fleet.address, "--root-certificates", fleet.known_keys.ca, "--key", fleet.known_keys.node(0))
    refused(done, r"another node that is online uses the key .*node-0\.key: stop it, or give this one its own key")


@pytest.mark.parametrize("who", ["unregistered", "live"])
def test_the_node_itself_is_kept_out_too(here: Marked, fleet: Fleet, strangers: Keys, who: str) -> None:
    key = strangers.node(0) if who == "unregistered" else fleet.known_keys.node(0)
    command = [program("flower-supernode"), "--superlink", fleet.address, "--root-certificates", fleet.known_keys.ca]
    command += ["--auth-supernode-private-key", key, "--port", str(free_port())]
    node = Process(who, command, here.env(), here.folder / f"{who}.log")
    try:
        assert node.wait(30), "it should have been refused"
        assert "Failed to activate SuperNode" in node.log.read_text()
    finally:
        stop_all([node])


def test_what_else_can_be_wrong(here: Marked, fleet: Fleet) -> None:
    keys = fleet.known_keys
    nobody = f"127.0.0.1:{free_port()}"
    for words, pattern in (
        ([nobody, "--root-certificates", keys.ca], "nothing listens on .*the proxy that passes /v1/fleet/ alone"),
        ([f"https://{fleet.address}", "--root-certificates", keys.ca], "must be HOST:PORT"),
        ([fleet.address, "--root-certificates", "nowhere.crt"], "there is no file nowhere.crt"),
        ([fleet.address, "--root-certificates", keys.node(1)], "is not a certificate in PEM form"),
        ([fleet.address, "--root-certificates", keys.ca, "--key", "nowhere.key"], "there is no key nowhere.key"),
        ([fleet.address, "--root-certificates", keys.ca, "--key", keys.ca], "is not a private key in OpenSSH form"),
        ([fleet.address, "--insecure", "--key", keys.node(1)], "node keys need TLS"),
    ):
        done = check(here, *words)
        refused(done, pattern)
        assert "0.0.0.0" not in done.stderr  # where Control would be open to all
    done = check(here, fleet.address)
    assert done.returncode == 2
    assert "give either --root-certificates FILE or --insecure" in done.stderr


@contextlib.contextmanager
def proxy(fleet: Fleet) -> Iterator[str]:
    """What docs/deploy.md asks for: TLS with the server's certificate, /v1/fleet/ and nothing else."""
    keys = fleet.known_keys
    outgoing = ssl.create_default_context(cafile=str(keys.ca))

    class Pass(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if not self.path.startswith("/v1/fleet/"):
                self.send_error(403)
                return
            body = self.rfile.read(int(self.headers["content-length"]))
            link = http.client.HTTPSConnection("127.0.0.1", fleet.port, context=outgoing, timeout=10)
            link.request("POST", self.path, body, dict(self.headers))
            answer = link.getresponse()
            content = answer.read()
            link.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pass)
    incoming = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    incoming.load_cert_chain(keys.certificate, keys.server_key)
    server.socket = incoming.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_behind_a_proxy_that_hides_control(here: Marked, fleet: Fleet, strangers: Keys) -> None:
    """A node that belongs can join; of a refusal Flower tells the device less, and so does the check."""
    keys = fleet.known_keys
    with proxy(fleet) as address:
        done = check(here, address, "--root-certificates", keys.ca, "--key", keys.node(1))
        assert done.returncode == 0, done.stderr
        assert "Control API" not in done.stdout
        for key in (keys.node(0), strangers.node(0)):
            done = check(here, address, "--root-certificates", keys.ca, "--key", key)
            refused(done, "either the SuperLink does not know the key .* or another node that is online uses the key")


@contextlib.contextmanager
def tls_server(keys: Keys) -> Iterator[int]:
    """Something that shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.certificate, keys.server_key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = server.accept()
                    with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                        secure.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]


def test_a_certificate_for_another_host(here: Marked) -> None:
    keys = make_keys(here.folder / "elsewhere", ["fleet.example.org", "192.0.2.7"], 1)
    with tls_server(keys) as port:
        done = check(here, f"127.0.0.1:{port}", "--root-certificates", keys.ca)
    refused(done, r"is for fleet\.example\.org, 192\.0\.2\.7, not for 127\.0\.0\.1.*--host 127\.0\.0\.1")


def test_keys_are_private_and_never_overwritten(here: Marked) -> None:
    words = ["deploy", "keys", "secrets", "--host", "192.0.2.7", "--nodes", "2"]
    done = here.run("fedge", *words)
    assert done.returncode == 0, done.stderr
    assert "On no machine:" in done.stdout
    folder = here.folder / "secrets"
    for path in folder.glob("*.key"):
        assert path.stat().st_mode & 0o077 == 0, path
    before = (folder / "ca.key").read_bytes()
    again = here.run("fedge", *words)
    assert again.returncode == 1
    assert "secrets/ca.crt exists: keys are never overwritten" in again.stderr
    assert (folder / "ca.key").read_bytes() == before
    with pytest.raises(KeysError, match="host is 'https://x', it must be an address"):
        make_keys(here.folder / "none", ["https://x"], 1)


def test_nothing_is_left_running(here: Marked, fleet: Fleet) -> None:
    """Last in this file: the fleet is stopped, and all its processes with it."""
    fleet.stop()
    assert not listens(fleet.port)
    assert not (fleet.folder / "keys/superexec.secret").exists()
    here.assert_no_process()
