"""What every client had to compute in every phase of an experiment's rounds."""

from __future__ import annotations

from fedge.edge.fit import Counting, Jobs
from fedge.experiment.parsing import Experiment
from fedge.experiment.setup import build
from fedge.experiment.training import basics_of, engine_of
from fedge.hooks import Observe
from fedge.loop import train


def flops_of(experiment: Experiment) -> Jobs:
    """By simulating it: cohorts and asks are those of any other link. Of the first algorithm, if there are several."""
    setup = build(experiment)
    algorithm = next(iter(setup.algorithms.values()))
    link = Counting(engine_of(setup.train).link(algorithm, setup.federation), setup.federation)
    never = Observe(evaluate_every=setup.train["rounds"])
    train(algorithm, setup.federation, **basics_of(setup.train), link=link, observe=never)
    return link.flops
