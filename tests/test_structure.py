"""The architecture, held by tests: imports flow one way, and the exported names are complete."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedge

ROOT = Path(fedge.__file__).parent

# What each part may import of ours. `core`, `tree`, `keys`, `checks` and `handle` are the base that all may use.
FILES = {"atomic", "regular"}
BASE = {"core", "tree", "keys", "checks", "once", "inputs", "losses", "handle", "ledger", "secret", *FILES}
ALLOWED: dict[str, set[str]] = {
    "core": {"inputs", "keys", "losses"},
    "inputs": set(),
    "losses": set(),
    "metrics": {"checks", "losses"},
    "problem": {"checks", "losses", "metrics"},
    "codecs": {"core", "tree", "keys", "checks"},
    "combine": {"core", "checks", "once"},
    "tree": set(),
    "keys": set(),
    "checks": set(),
    "once": set(),
    "regular": set(),
    "atomic": {"regular"},
    "secret": {"regular"},
    "ledger": {"core"},
    "handle": {"core", "inputs", "keys", "losses", "once"},
    "data": {*FILES, "checks", "inputs"},
    "partition": {"checks"},
    "models": {"checks"},
    "federation": {"data"},
    "engine": {*BASE, "federation"},
    "algorithms": {*BASE, "codecs", "combine"} - {"ledger", *FILES},
    "hooks": {"checks", "metrics"},
    "edge": {*BASE, "federation", "engine", "algorithms"},
    "evaluate": {*BASE, "data", "engine", "metrics", "problem"},
    "toml": set(),
    "runs": {*BASE, "engine", "federation", "evaluate", "problem", "toml"},
    "preflight": {*BASE, "federation", "engine"},
    "loop": {
        *BASE,
        "federation",
        "engine",
        "evaluate",
        "metrics",
        "per_client",
        "problem",
        "runs",
        "preflight",
        "hooks",
    },
    "per_client": {*BASE, "engine", "evaluate", "federation", "hooks", "metrics", "problem", "runs"},
    "report": {*BASE, "runs", "toml"},
    "deploy": {*BASE, "algorithms", "combine", "federation", "engine", "loop", "runs", "toml", "experiment", "hooks"},
    "experiment": {
        *BASE,
        "data",
        "partition",
        "preflight",
        "models",
        "federation",
        "engine",
        "algorithms",
        "edge",
        "evaluate",
        "hooks",
        "loop",
        "metrics",
        "problem",
        "runs",
        "toml",
    },
    "attacks": {*BASE, "algorithms", "combine", "data", "engine", "experiment", "federation", "runs", "loop"},
    "bench": {*BASE, "data", "partition", "models", "federation", "engine", "algorithms", "loop", "hooks"},
    "sweep": {*BASE, "data", "engine", "loop", "runs", "experiment", "federation", "report", "toml"},
    "cli": {
        *BASE,
        "algorithms",
        "data",
        "edge",
        "sweep",
        "federation",
        "engine",
        "runs",
        "toml",
        "experiment",
        "report",
        "deploy",
        "attacks",
        "bench",
    },
}
NEEDS_AN_EXTRA = {
    "typer",
    "rich",
    "matplotlib",
    "tensorboard",
    "librosa",
    "pooch",
    "flwr",
    "sklearn",
    "scipy",
    "pandas",
    "dp_accounting",
    "mlflow",
    "wandb",
}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path, nested: bool) -> set[str]:
    """Absolute names that a file imports, at its top level or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if nested else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def sources() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path not in (ROOT / "__init__.py", ROOT / "__main__.py")]


def test_imports_flow_one_way() -> None:
    for path in sources():
        part = part_of(path)
        ours = {name.split(".")[1] for name in imports(path, nested=True) if name.startswith("fedge.")}
        extra = {name for name in ours if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()}
        extra -= {part} | ALLOWED[part]
        assert not extra, f"{path.relative_to(ROOT)} imports fedge.{', fedge.'.join(extra)}"


def test_the_library_imports_nothing_that_uses_it() -> None:
    for path in sources():
        outside = {name.split(".")[0] for name in imports(path, nested=True)}
        assert not outside & {"benchmarks", "examples", "tests"}, path.relative_to(ROOT)


def test_every_part_is_in_the_table() -> None:
    assert {part_of(path) for path in sources()} <= set(ALLOWED)


def rooms() -> set[str]:
    """Packages and top-level modules of the library, and one level more inside `engine` and `handle`."""
    engine = {path for path in (ROOT / "engine").iterdir() if path.name != "__init__.py"}
    found = {*ROOT.iterdir(), *engine, *(path for path in (ROOT / "handle").iterdir() if path.is_dir())}
    kept = {path for path in found if path.suffix == ".py" or (path / "__init__.py").exists()}
    names = {f"{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in kept}
    return names - {"__init__.py", "__main__.py", "engine/"}  # whose rooms are named one by one


def test_the_map_is_true_of_the_whole_tree() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    named = [name for line in table for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert len(named) == len(set(named))
    assert set(named) == rooms()


def test_everything_that_contributing_names_exists() -> None:
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:fedge|tests|benchmarks)/[\w/.]+)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT.parent / name).exists()] == []
    makefile = (ROOT.parent / "Makefile").read_text()
    targets = {word for line in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", text) for word in line.split()}
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"test-all", "test-deploy", "drill", "test-data"} <= targets & known
    assert {word for word in targets if word.startswith(("test", "check", "drill"))} <= known


def test_a_first_run_does_not_wait_for_the_development_tools() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    does = {
        target: subprocess.run(
            ["make", "--dry-run", "--always-make", target], cwd=ROOT.parent, capture_output=True, text=True, check=True
        ).stdout
        for target in ("run", "test")
    }
    assert "-e '.[cli,report]'" in does["run"]
    assert "[dev]" not in does["run"]
    assert "-e '.[dev]'" in does["test"]


def test_the_core_needs_torch_and_numpy_alone() -> None:
    for path in sources():
        if part_of(path) in ("cli", "report", "deploy"):
            continue
        outside = {name.split(".")[0] for name in imports(path, nested=False)}
        assert not outside & NEEDS_AN_EXTRA, f"{path.relative_to(ROOT)} needs {outside & NEEDS_AN_EXTRA}"


def loaded(code: str) -> set[str]:
    """The modules that a fresh interpreter has after `code`."""
    code = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_all_public_names_together_load_no_extra() -> None:
    assert not loaded("from fedge import *") & NEEDS_AN_EXTRA


@pytest.mark.parametrize("code", ["import fedge", "import fedge.cli.app"])
def test_nothing_waits_for_torch_before_it_is_used(code: str) -> None:
    assert not loaded(code) & {"torch", "numpy"}


def test_a_function_is_not_hidden_by_a_module_of_its_name() -> None:
    for name in fedge.__all__:
        if name not in fedge._MODULES:
            assert not (ROOT / f"{name}.py").exists()
            assert not (ROOT / name).exists()


def test_exported_names_exist_and_are_complete() -> None:
    for name in fedge.__all__:
        assert hasattr(fedge, name), name
    public = {name for name in vars(fedge) if not name.startswith("_")}
    submodules = {path.stem for path in ROOT.iterdir()}
    assert public - submodules - {"import_module"} <= set(fedge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'FedAvgg'"):
        _ = fedge.FedAvgg  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names_from_the_same_places() -> None:
    tree = ast.parse((ROOT / "__init__.pyi").read_text())
    seen = {alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == fedge._PLACE | dict.fromkeys(fedge._MODULES, "fedge")
    listed = next(node for node in tree.body if isinstance(node, ast.Assign)).value
    assert sorted(ast.literal_eval(listed)) == fedge.__all__
