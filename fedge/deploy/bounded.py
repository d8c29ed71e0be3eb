"""Answers of a host that is not known yet: whole within a time and a size, or an error."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

SECONDS = 20.0  # for one answer, from the first byte that is sent to the last that comes
MOST = 1 << 22  # bytes; a SuperLink's answers about one node have some hundred, a list of nodes some hundred per node
ENCODING = ("content-encoding", "content-length")


class Bounded:
    """An interceptor of Flower's HTTP clients, the innermost: it sends by itself, and reads only so much.

    httpx's own time limit begins anew with every byte, it unpacks what says that it is packed, and Flower follows
    redirections, which a SuperLink never sends.
    """

    def __init__(self, ca: Path | None) -> None:
        self._verify: ssl.SSLContext | bool = ca is not None
        if ca is not None:
            self._verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._verify.load_verify_locations(cafile=str(ca))

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        found: list[httpx.Response | BaseException] = []
        late = threading.Event()

        def ask() -> None:
            try:
                found.append(self._answer(context.request, late))
            except BaseException as error:
                found.append(error)

        asking = threading.Thread(target=ask, daemon=True)  # nobody can end what waits for a header without end
        asking.start()
        asking.join(SECONDS)
        if not found:
            late.set()
            raise httpx.ReadTimeout(f"no whole answer within {SECONDS:g} s", request=context.request)
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def _answer(self, request: httpx.Request, late: threading.Event) -> httpx.Response:
        with httpx.Client(verify=self._verify, timeout=SECONDS) as client:
            response = client.send(request, stream=True)
            content = bytearray()
            for piece in response.iter_raw():  # as it travels: nothing is unpacked
                content += piece
                if len(content) > MOST:
                    raise httpx.ReadError(f"the answer has more than {MOST >> 20} MiB", request=request)
                if late.is_set():
                    break
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in ENCODING]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=request)
