"""How many good replies a round of an experiment can have."""

from __future__ import annotations

from fedge.algorithms.asynchronous import Asynchronous
from fedge.algorithms.wrapper import chain
from fedge.experiment import ExperimentError, Setup


def check_replies(minimum: int, setup: Setup) -> None:
    """Refused before anything is started, for every round would be skipped."""
    clients, drawn = setup.federation.clients, setup.train["cohort"]
    for algorithm in setup.algorithms.values():
        varies = setup.train["sampling"] == "poisson" or any(isinstance(one, Asynchronous) for one in chain(algorithm))
        asked = clients if varies or drawn is None else drawn
        if minimum > asked:
            more = "" if asked == clients else ", or raise cohort in [train]"
            raise ExperimentError(
                f"min-replies is {minimum}, but {asked} clients at most answer in a round: lower it{more}"
            )
