"""fedge: federated edge learning, fast to simulate, honest about bytes, and the same on a real fleet."""

from fedge import data, models, partition
from fedge.algorithms import SGD, Adam, Averaged, DataSharing, FedAvg, FedCM, FedDANE, FedOVA, FisherLBFGS, Spectral
from fedge.core import Algorithm, Ask, Batch, Reply, Task
from fedge.federation import Federation
from fedge.handle import cross_entropy
from fedge.run import Run
from fedge.runfolder import RunFolderError
from fedge.train import train

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "Algorithm",
    "Ask",
    "Averaged",
    "Batch",
    "DataSharing",
    "FedAvg",
    "FedCM",
    "FedDANE",
    "FedOVA",
    "Federation",
    "FisherLBFGS",
    "Reply",
    "Run",
    "RunFolderError",
    "Spectral",
    "Task",
    "cross_entropy",
    "data",
    "models",
    "partition",
    "train",
]
