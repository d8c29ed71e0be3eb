"""What is different for a command that torchrun started several times."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from fedge.cli.errors import FAILED
from fedge.cli.interrupt import Interrupt
from fedge.cli.progress import Display
from fedge.engine.ranks.process_group import Group

GRACE = 25.0  # seconds; torchrun kills 30 seconds after it has asked
LATE = "Error: ended by a signal while waiting for this phase, or for a process that died; the checkpoints are intact."


def program(environment: Mapping[str, str] = os.environ) -> str:
    """How this command was started, as a person types it."""
    size, here = int(environment.get("WORLD_SIZE", 1)), environment.get("LOCAL_WORLD_SIZE")
    if size == 1:
        return "fedge"
    return f"torchrun --nproc-per-node {here} -m fedge" if str(size) == here else "torchrun ... -m fedge"


@contextmanager
def stopping(group: Group, display: Display) -> Iterator[Interrupt]:
    """Signals as a wish to stop. torchrun passes Ctrl-C on, and sends SIGTERM to the others when a rank has died."""
    alone = group.size == 1
    say = display.stopping if group.leads else lambda: None
    with Interrupt(say, () if alone else (signal.SIGTERM,)) as interrupt, nullcontext() if alone else _deadline(group):
        yield interrupt


@contextmanager
def _deadline(group: Group) -> Iterator[None]:
    """End this process some time after a signal, whatever the main thread does.

    Python's own handlers run in the main thread, which may be waiting for a dead rank inside a GPU library; the number
    of a signal still arrives in this pipe.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    ended = threading.Event()

    def watch() -> None:
        if os.read(reading, 1) and not ended.wait(GRACE):
            if group.leads:
                os.write(2, f"\n{LATE}\n".encode())
            os._exit(FAILED)
        os.close(reading)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
