"""Ways to deal examples out: labels and a seed in, one index array per client out."""

from fedge.partition.by_group import by_group
from fedge.partition.dirichlet import dirichlet
from fedge.partition.iid import iid
from fedge.partition.labels_per_client import labels_per_client
from fedge.partition.quantity_skew import quantity_skew

__all__ = ["by_group", "dirichlet", "iid", "labels_per_client", "quantity_skew"]
