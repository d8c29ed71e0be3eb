"""The model handle: what algorithms call instead of the module."""

from fedge.handle.fast import FastHandle
from fedge.handle.graph import GraphHandle
from fedge.handle.layer import NotAChain
from fedge.handle.module import check_module, parameters
from fedge.handle.plain import Handle
from fedge.handle.written import WrittenHandle
from fedge.losses import by_target, cross_entropy

__all__ = [
    "FastHandle",
    "GraphHandle",
    "Handle",
    "NotAChain",
    "WrittenHandle",
    "by_target",
    "check_module",
    "cross_entropy",
    "parameters",
]
