"""fedge: federated edge learning, fast to simulate, honest about bytes, and the same on a real fleet."""

from fedge import data, models, partition
from fedge.algorithms import Averaged, DataSharing, FedAvg, FedDANE, FedOVA, FisherLBFGS
from fedge.core import Algorithm, Ask, Batch, Reply, Task
from fedge.federation import Federation
from fedge.handle import cross_entropy
from fedge.runs.folder import RunFolderError
from fedge.runs.run import Run
from fedge.train import train

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Ask",
    "Averaged",
    "Batch",
    "DataSharing",
    "FedAvg",
    "FedDANE",
    "FedOVA",
    "Federation",
    "FisherLBFGS",
    "Reply",
    "Run",
    "RunFolderError",
    "Task",
    "cross_entropy",
    "data",
    "models",
    "partition",
    "train",
]
