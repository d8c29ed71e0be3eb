"""One file a paper. Every algorithm is a frozen dataclass of hyper-parameters against the contract of `core`."""

from fedge.algorithms.fedavg import FedAvg
from fedge.core import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {"fedavg": FedAvg}  # type: ignore[type-arg]

__all__ = ["ALGORITHMS", "FedAvg"]
