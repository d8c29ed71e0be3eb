"""The paper's experiments, which are not part of the package: found in a checkout and loaded from there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fedge.experiment import ExperimentError
from fedge.sweep import Study

PLACE = Path("benchmarks", "paper")
PACKAGE = "benchmarks.paper"
BESIDE = Path(__file__).resolve().parents[2]  # of a checkout, its root


def study(given: Path | None) -> Study:
    """That of the named folder, of the current one, or of the checkout that fedge is run from."""
    _load(_find([Path.cwd(), BESIDE] if given is None else [given]))
    found: Study = importlib.import_module(f"{PACKAGE}.study").study()
    return found


def _find(places: list[Path]) -> Path:
    for place in places:
        for folder in (place / PLACE, place):
            if (folder / "study.py").is_file() and (folder / "paper.toml").is_file():
                return folder.resolve()
    raise ExperimentError(
        "fedge reproduce needs the repository: git clone it and run the command there, or name it with --paper FOLDER"
    )


def _load(folder: Path) -> ModuleType:
    """By its path: another package may be called `benchmarks` too."""
    known = sys.modules.get(PACKAGE)
    if known is not None and [Path(path).resolve() for path in known.__path__] == [folder]:
        return known
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]  # of another checkout
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
