"""The Flower app of an experiment: a folder that `flwr run` accepts. examples/flower_app is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedge import toml
from fedge.deploy.server import RUN_CONFIG
from fedge.experiment import Experiment

MODULE = '''"""Both sides of the fleet, from the experiment file beside this module."""

from pathlib import Path

from fedge.deploy import experiment_client, experiment_server

EXPERIMENT = Path(__file__).with_name("experiment.toml")

client = experiment_client(EXPERIMENT)
server = experiment_server(EXPERIMENT)
'''


def project(name: str, config: Mapping[str, Any] = RUN_CONFIG) -> dict[str, Any]:
    """What Flower wants to know about an app."""
    components = {"serverapp": "fleet.app:server", "clientapp": "fleet.app:client"}
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": "An experiment of fedge on a fleet",
            "license": "MIT",
            "dependencies": ["flwr>=1.41.0,<2"],
        },
        "tool": {"flwr": {"app": {"publisher": "fedge", "components": components, "config": dict(config)}}},
    }


def write_app(folder: Path, experiment: Experiment) -> Path:
    """The app folder of an experiment as it is resolved now, so that every node does the same."""
    module = folder / "fleet"
    module.mkdir(parents=True, exist_ok=True)
    (module / "__init__.py").write_text("")
    (module / "app.py").write_text(MODULE)
    (module / "experiment.toml").write_text(toml.dump(experiment.table()))
    (folder / "pyproject.toml").write_text(toml.dump(project("fedge-experiment")))
    return folder
