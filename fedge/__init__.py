"""fedge: federated edge learning, fast to simulate, honest about bytes, and the same on a real fleet.

A name is loaded when it is first used, so that `import fedge` and `fedge --help` do not wait for torch.
`__init__.pyi` lists the same names for type checkers.
"""

from importlib import import_module

__version__ = "0.1.0"

_PLACES = {
    "fedge.algorithms": (
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
    ),
    "fedge.codecs": ("Cast", "Quantise", "TopK"),
    "fedge.combine": ("BoundedMean", "ClippedMean", "Gather", "Krum", "Mean", "Median", "TrimmedMean"),
    "fedge.core": ("Algorithm", "Ask", "Batch", "Codec", "Combine", "Reply", "Task"),
    "fedge.engine": ("Engine",),
    "fedge.experiment.loading": ("load_run",),
    "fedge.federation": ("Federation",),
    "fedge.handle": ("cross_entropy",),
    "fedge.hooks": ("Best", "Observe", "Plateau", "Reached", "Spent"),
    "fedge.loop": ("train",),
    "fedge.per_client": ("by_client",),
    "fedge.report.tidy": ("results",),
    "fedge.runs.folder": ("RunFolderError",),
    "fedge.runs.run": ("Run",),
}
_MODULES = ("data", "edge", "losses", "metrics", "models", "partition")
_PLACE = {name: module for module, names in _PLACES.items() for name in names}

__all__ = sorted([*_PLACE, *_MODULES])


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"fedge.{name}")
    if name not in _PLACE:
        raise AttributeError(f"module 'fedge' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PLACE[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
