"""Experiments: one TOML file whose fields are those of the functions and dataclasses it names.

experiment = load("digits.toml", ["train.rounds=20"])
compare(experiment, "runs/digits")
"""

from fedge.experiment.comparison import Outcome, Watch, compare
from fedge.experiment.counting import flops_of
from fedge.experiment.errors import ExperimentError
from fedge.experiment.meter import Meter, Progress
from fedge.experiment.parsing import Experiment, parse
from fedge.experiment.planning import Plan, load, load_federation, plan
from fedge.experiment.setup import Setup, build, edge_of
from fedge.runs.experiments import EXPERIMENT_FILE, run_folders, slug

__all__ = [
    "EXPERIMENT_FILE",
    "Experiment",
    "ExperimentError",
    "Meter",
    "Outcome",
    "Plan",
    "Progress",
    "Setup",
    "Watch",
    "build",
    "compare",
    "edge_of",
    "flops_of",
    "load",
    "load_federation",
    "parse",
    "plan",
    "run_folders",
    "slug",
]
