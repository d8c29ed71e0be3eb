"""Ray keeps sockets in its folder, whose path must be short; it is removed at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def ray_folder() -> Iterator[None]:
    short = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    with short as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", name)
        yield
