"""Recurrent layers of J clients: one layer in its one or two directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _VF, Tensor

from fedge.handle.recurrent import Call, Layer, by_torch
from fedge.handle.stacked import gru, lstm
from fedge.handle.stacked.by_client import by_client, tell
from fedge.handle.stacked.rule import stacked


def has_rule(func: Any, call: Call) -> bool:
    """LSTM and GRU, but for projections (proj_size), which are a further weight, and sequences without a batch axis."""
    each = 4 if call.has_biases else 2
    return func in MANY and call.x.dim() == 3 and len(call.weights) == each * call.layers * call.directions


def by_rule(func: Any, other: Callable[..., Any] | None = None) -> Layer:
    """One layer; within vmap over clients all of them at once, by the rule or by another that does the same."""
    many = other or MANY[func]
    return lambda call: _directions(call, lambda *tensors: stacked(_alone(many), many, *tensors))


def cell(func: Any, args: tuple[Any, ...], other: Callable[..., Any] | None = None) -> Any:
    """nn.LSTMCell or nn.GRUCell, as a layer that reads one time step."""
    x, given, *rest = args
    states = tuple(given) if isinstance(given, tuple | list) else (given,)
    many = other or MANY[CELLS[func]]
    tensors = [x.unsqueeze(1), *states, *(part for part in rest if part is not None)]
    _, *ends = stacked(_alone(many), many, *tensors)
    return tuple(ends) if len(ends) > 1 else ends[0]


def alone(func: Any) -> Layer:
    """One layer of one client by the same rule, outside vmap."""
    return lambda call: _directions(call, _alone(MANY[func]))


def apart(func: Any) -> Layer:
    """One layer by torch itself, client by client."""
    tell(func.__name__)
    run = by_torch(func)
    return lambda call: by_client(run, (call,), {})


def _directions(call: Call, run: Callable[..., Any]) -> tuple[Tensor, ...]:
    x = call.x if call.batch_first else call.x.transpose(0, 1)  # [B, T, D]
    each = len(call.weights) // call.directions
    outs, last = [], []
    for at in range(call.directions):
        states, weights = [state[at] for state in call.states], call.weights[at * each : (at + 1) * each]
        out, *ends = run(x.flip(1) if at else x, *states, *weights)
        outs.append(out.flip(1) if at else out)
        last.append(ends)
    found = torch.cat(outs, -1) if call.bidirectional else outs[0]
    found = found if call.batch_first else found.transpose(0, 1)
    return found, *(torch.stack(ends) for ends in zip(*last, strict=True))


def _alone(many: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors: tuple(part.squeeze(0) for part in many(*(tensor.unsqueeze(0) for tensor in tensors)))


def _lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, v: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    """x [J, B, T, D] -> [J, B, T, H], and the last h and c."""
    b = biases[0] + biases[1] if biases else w.new_zeros(w.shape[:2])
    out, end = lstm.Layer.apply(x.transpose(1, 2).contiguous(), h, c, w, v, b)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), out[:, -1], end


def _gru(x: Tensor, h: Tensor, w: Tensor, v: Tensor, *biases: Tensor) -> tuple[Tensor, ...]:
    b, a = biases or (w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[:2]))
    out = gru.Layer.apply(x.transpose(1, 2).contiguous(), h, w, v, b, a)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), out[:, -1]


CELLS = {_VF.lstm_cell: _VF.lstm, _VF.gru_cell: _VF.gru}
MANY: dict[Any, Callable[..., tuple[Tensor, ...]]] = {_VF.lstm: _lstm, _VF.gru: _gru}
