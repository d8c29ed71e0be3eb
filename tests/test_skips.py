"""A test that is skipped is said, and fails where FEDGE_NO_SKIPS is set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("value", "code", "said"), [("", 0, "1 skipped"), ("true", 1, "FEDGE_NO_SKIPS is set: Skipped: no tool")]
)
def test_a_skipped_test_fails_where_none_may_be(value: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport\n")
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it(): pytest.skip('no tool')\n")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=os.environ | {"FEDGE_NO_SKIPS": value, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, said in found.stdout) == (code, True), found.stdout
    assert "no tool" in found.stdout
