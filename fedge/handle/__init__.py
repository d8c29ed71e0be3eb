"""The model handle: what algorithms call instead of the module."""

from fedge.handle.fast import FastHandle
from fedge.handle.graph import GraphHandle
from fedge.handle.layer import NotAChain
from fedge.handle.module import check_module, parameters
from fedge.handle.plain import Handle, cross_entropy
from fedge.handle.written import WrittenHandle

__all__ = [
    "FastHandle",
    "GraphHandle",
    "Handle",
    "NotAChain",
    "WrittenHandle",
    "check_module",
    "cross_entropy",
    "parameters",
]
