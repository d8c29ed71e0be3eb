"""Real fleets, over Flower: the same algorithm objects, the same worker, the same bytes.

This package needs the extra `flower`: pip install 'fedge[flower]'.
"""

from fedge.deploy.client import client_app
from fedge.deploy.flower import FlowerLink
from fedge.deploy.roster import NodesMissing, Roster
from fedge.deploy.server import experiment_client, experiment_server, serve

__all__ = ["FlowerLink", "NodesMissing", "Roster", "client_app", "experiment_client", "experiment_server", "serve"]
