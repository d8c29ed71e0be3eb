"""The public names, for type checkers and editors; `__init__.py` loads each when it is first used."""

from fedge import data, edge, losses, metrics, models, partition
from fedge.algorithms import (
    DONE,
    FOOF,
    GIANT,
    SCAFFOLD,
    SGD,
    SOAP,
    Adam,
    Averaged,
    Calibrated,
    Compressed,
    DataSharing,
    FedAsync,
    FedAvg,
    FedBuff,
    FedCM,
    FedDANE,
    FedNova,
    FedOVA,
    FedPer,
    FedProx,
    FisherLBFGS,
    Private,
    Robust,
    Shampoo,
    SharedOVA,
    Spectral,
    SubspaceNewton,
)
from fedge.codecs import Cast, Quantise, TopK
from fedge.combine import BoundedMean, ClippedMean, Gather, Krum, Mean, Median, TrimmedMean
from fedge.core import Algorithm, Ask, Batch, Codec, Combine, Reply, Task
from fedge.engine import Engine
from fedge.experiment.loading import load_run
from fedge.federation import Federation
from fedge.handle import cross_entropy
from fedge.hooks import Best, Observe, Plateau, Reached, Spent
from fedge.loop import train
from fedge.per_client import by_client
from fedge.report.tidy import results
from fedge.runs.folder import RunFolderError
from fedge.runs.run import Run

__version__: str

__all__ = [
    "DONE",
    "FOOF",
    "GIANT",
    "SCAFFOLD",
    "SGD",
    "SOAP",
    "Adam",
    "Algorithm",
    "Ask",
    "Averaged",
    "Batch",
    "Best",
    "BoundedMean",
    "Calibrated",
    "Cast",
    "ClippedMean",
    "Codec",
    "Combine",
    "Compressed",
    "DataSharing",
    "Engine",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedCM",
    "FedDANE",
    "FedNova",
    "FedOVA",
    "FedPer",
    "FedProx",
    "Federation",
    "FisherLBFGS",
    "Gather",
    "Krum",
    "Mean",
    "Median",
    "Observe",
    "Plateau",
    "Private",
    "Quantise",
    "Reached",
    "Reply",
    "Robust",
    "Run",
    "RunFolderError",
    "Shampoo",
    "SharedOVA",
    "Spectral",
    "Spent",
    "SubspaceNewton",
    "Task",
    "TopK",
    "TrimmedMean",
    "by_client",
    "cross_entropy",
    "data",
    "edge",
    "load_run",
    "losses",
    "metrics",
    "models",
    "partition",
    "results",
    "train",
]
