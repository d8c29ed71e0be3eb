"""Both sides of the fleet, from the experiment file beside this module."""

from pathlib import Path

from fedge.deploy import experiment_client, experiment_server

EXPERIMENT = Path(__file__).with_name("experiment.toml")

client = experiment_client(EXPERIMENT)
server = experiment_server(EXPERIMENT)
