"""One file per paper. Every algorithm is a frozen dataclass of hyper-parameters against the contract of `core`."""

from typing import Any

from fedge.algorithms.asynchronous import FedAsync, FedBuff
from fedge.algorithms.averaged import Averaged
from fedge.algorithms.calibrated import Calibrated
from fedge.algorithms.compressed import Compressed
from fedge.algorithms.data_sharing import DataSharing
from fedge.algorithms.done import DONE
from fedge.algorithms.fedavg import FedAvg
from fedge.algorithms.fedcm import FedCM
from fedge.algorithms.feddane import FedDANE
from fedge.algorithms.fednova import FedNova
from fedge.algorithms.fedova import FedOVA
from fedge.algorithms.fedper import FedPer
from fedge.algorithms.fedprox import FedProx
from fedge.algorithms.fisher_lbfgs import FisherLBFGS
from fedge.algorithms.foof import FOOF
from fedge.algorithms.giant import GIANT
from fedge.algorithms.kronecker import SOAP, Shampoo
from fedge.algorithms.optimisers import SGD, Adam
from fedge.algorithms.private import Private
from fedge.algorithms.robust import Robust
from fedge.algorithms.scaffold import SCAFFOLD
from fedge.algorithms.shared_ova import SharedOVA
from fedge.algorithms.spectral import Spectral
from fedge.algorithms.subspace_newton import SubspaceNewton
from fedge.core import Algorithm

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "fedcm": FedCM,
    "scaffold": SCAFFOLD,
    "fedper": FedPer,
    "feddane": FedDANE,
    "fisher_lbfgs": FisherLBFGS,
    "foof": FOOF,
    "subspace_newton": SubspaceNewton,
    "giant": GIANT,
    "done": DONE,
    "fedova": FedOVA,
    "shared_ova": SharedOVA,
    "data_sharing": DataSharing,
    "averaged": Averaged,
    "calibrated": Calibrated,
    "robust": Robust,
    "compressed": Compressed,
    "private": Private,
}
ASYNCHRONOUS: dict[str, type[Algorithm[Any]]] = {"fedbuff": FedBuff, "fedasync": FedAsync}  # these need a clock

__all__ = [
    "ALGORITHMS",
    "ASYNCHRONOUS",
    "DONE",
    "FOOF",
    "GIANT",
    "SCAFFOLD",
    "SGD",
    "SOAP",
    "Adam",
    "Averaged",
    "Calibrated",
    "Compressed",
    "DataSharing",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedCM",
    "FedDANE",
    "FedNova",
    "FedOVA",
    "FedPer",
    "FedProx",
    "FisherLBFGS",
    "Private",
    "Robust",
    "Shampoo",
    "SharedOVA",
    "Spectral",
    "SubspaceNewton",
]
