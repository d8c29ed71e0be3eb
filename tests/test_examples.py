"""Every example runs by itself, says what it promises, and leaves nothing behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import warm

EXAMPLES = Path(__file__).parent.parent / "examples"
PERCENT = r"\d+\.\d %"
EXPECTED: dict[str, list[str]] = {  # patterns that the output must hold, in this order
    "algorithm_in_30_lines.py": [
        rf"FedAvg +({PERCENT} +\d+\.\d+)\nFedProx, mu = 0 +\1\n",  # without the spring it is FedAvg
        rf"FedProx +{PERCENT}",
    ],
    "compare.py": [rf"FedAvg +{PERCENT}", rf"FedOVA +{PERCENT}", rf"FedOVA \+ spectral +{PERCENT} +\d+\.\d\d"],
    "from_fedlab.py": [r"clients=100", rf"FedAvg +{PERCENT}", rf"SCAFFOLD +{PERCENT}"],
    "from_flower.py": [r"round 15: [6-9]\d\.\d %", r"MB up; result.arrays is 8 tensors"],
    "from_pfl.py": [rf"iteration 20: accuracy {PERCENT}", r"iteration 60: accuracy [6-9]\d\.\d %"],
    "next_character.py": [r"'lengths': \(\)", rf"round 15: {PERCENT} of characters right, perplexity 1\.\d", r"wind"],
    "regression_from_csv.py": [r"round 20: off by 0\.\d\d kWh, R2 0\.9\d\d", r"worst served: flat-\d\d, off by 0"],
    "several_inputs.py": [r"'scan': \(1, 8, 8\)", r"round 12: [89]\d\.\d % right", r"without the values: [567]"],
    "own_data_and_model.py": [r"classes=3", r"clients=30", rf"round 15: {PERCENT}", r"MB up", r"the model says"],
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = warm.run([EXAMPLES / name], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(".*".join(EXPECTED[name]), done.stdout, re.DOTALL), done.stdout
    assert not list(tmp_path.iterdir())


def test_the_experiment_file_runs(tmp_path: Path) -> None:
    command = ["-m", "fedge", "run", EXAMPLES / "from_fluke.toml", "--set", "train.rounds=2", "--no-report"]
    done = warm.run([*command, "--out", "out"], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"fedavg +2 .*\nscaffold +2 ", done.stdout), done.stdout
    assert {path.name for path in EXAMPLES.glob("*.toml")} == {"from_fluke.toml"}


def test_thirty_lines_are_thirty() -> None:
    text = (EXAMPLES / "algorithm_in_30_lines.py").read_text("utf-8")
    algorithm = text[text.index("@dataclass") : text.index("def main")].strip()
    assert len(algorithm.splitlines()) <= 30
