"""A trained network as a file that other programs read."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from fedge.checks import nearest
from fedge.inputs import Inputs, arguments, map_
from fedge.runs import atomic
from fedge.runs.experiments import is_run
from fedge.runs.folder import STATES

About = Mapping[str, str]  # what a file says beside the tensors


class ExportError(ValueError):
    """What cannot be written as a file, and what to do."""


class MissingFormat(ImportError):
    """A format whose package is not installed."""


def save(module: nn.Module, path: Path, example: Inputs, classes: Sequence[str] = ()) -> Path:
    """Write a module by the suffix of the path; formats that hold the program need an example of its input.

    Formats that have room for it say what the classes are called, as a JSON list under the key `classes`.
    """
    write = FORMATS.get(path.suffix)
    if write is None:
        known = ", ".join(FORMATS)
        raise ExportError(f"{path} ends in {path.suffix!r}{nearest(path.suffix, FORMATS)}: choose one of {known}")
    if path.name in STATES and is_run(path.parent):
        raise ExportError(f"{path} is a file of the run itself, which would be lost: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"classes": json.dumps(list(classes), ensure_ascii=False)} if classes else {}
    atomic.write_atomically(path, write(module, example, about))
    return path


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every name with memory of its own, tied or not, so that any reader can load it."""
    return {name: leaf.detach().clone().contiguous() for name, leaf in module.state_dict().items()}


def _state_dict(module: nn.Module, example: Inputs, about: About) -> bytes:
    """The tensors alone: whatever else was in it would be one more name for `load_state_dict`."""
    buffer = io.BytesIO()
    torch.save(_tensors(module), buffer)
    return buffer.getvalue()


def _safetensors(module: nn.Module, example: Inputs, about: About) -> bytes:
    written: bytes = _needs("safetensors.torch").save(_tensors(module), about or None)
    return written


def _program(module: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    """The computation for any number of examples; traced with two, as one would count as a constant."""
    if example is None:
        raise ExportError("this run does not know its inputs: set run.example to one, [1, ...], and save again")
    many = torch.export.Dim("examples", min=1)
    args, named = arguments(map_(lambda part: part.expand(2, *part.shape[1:]).contiguous(), example))
    shapes = {name: {0: many} for name in named} if named else tuple({0: many} for _ in args)
    with _quiet():  # of LSTMs it warns about their own flat weights
        return torch.export.export(module, args, named, dynamic_shapes=shapes)


def _torch_export(module: nn.Module, example: Inputs, about: About) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_program(module, example), buffer, extra_files=dict(about))
    return buffer.getvalue()


def _onnx(module: nn.Module, example: Inputs, about: About) -> bytes:
    _needs("onnx")
    _needs("onnxscript")
    with _quiet():
        names = ["x"] if isinstance(example, Tensor) else list(arguments(example)[1]) or None
        program = torch.onnx.export(_program(module, example), dynamo=True, input_names=names, output_names=["scores"])
    assert program is not None
    proto = program.model_proto
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value)
    written: bytes = proto.SerializeToString()
    return written


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on its own inside."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _needs(name: str):  # type: ignore[no-untyped-def]
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingFormat(f"this format needs {package}: pip install 'fedge[export]'", name=package) from error


FORMATS: dict[str, Callable[[nn.Module, Inputs, About], bytes]] = {
    ".safetensors": _safetensors,
    ".pt": _state_dict,
    ".pt2": _torch_export,
    ".onnx": _onnx,
}
