"""One file a paper. Every algorithm is a frozen dataclass of hyper-parameters against the contract of `core`."""

from typing import Any

from fedge.algorithms.averaged import Averaged
from fedge.algorithms.data_sharing import DataSharing
from fedge.algorithms.fedavg import FedAvg
from fedge.algorithms.feddane import FedDANE
from fedge.algorithms.fedova import FedOVA
from fedge.algorithms.fisher_lbfgs import FisherLBFGS
from fedge.core import Algorithm

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "fedavg": FedAvg,
    "feddane": FedDANE,
    "fisher_lbfgs": FisherLBFGS,
    "fedova": FedOVA,
    "data_sharing": DataSharing,
    "averaged": Averaged,
}

__all__ = ["ALGORITHMS", "Averaged", "DataSharing", "FedAvg", "FedDANE", "FedOVA", "FisherLBFGS"]
