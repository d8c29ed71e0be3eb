"""What torch.lstm and torch.gru are asked, and their layers one after another with addressed dropout between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import _VF, Tensor
from torch.overrides import TorchFunctionMode

STATES: dict[Any, int] = {_VF.lstm: 2, _VF.gru: 1, _VF.rnn_tanh: 1, _VF.rnn_relu: 1}  # h and c, or h alone


class Call(NamedTuple):
    """The arguments of torch's recurrent functions, as nn.LSTM, nn.GRU and nn.RNN give them."""

    x: Tensor
    states: tuple[Tensor, ...]  # [layers * directions, B, H] each
    weights: list[Tensor]  # per layer and direction: of the input, of the state and, if there are any, two biases
    has_biases: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def draws(self) -> bool:
        """Whether there are dropout masks between its layers."""
        return bool(self.dropout) and self.training and self.layers > 1


def arguments(func: Any, args: tuple[Any, ...]) -> Call:
    """The arguments of a call; packed sequences are refused."""
    if isinstance(args[3], list | tuple):
        refuse_packed()
    states = tuple(args[1]) if STATES[func] == 2 else (args[1],)
    return Call(args[0], states, list(args[2]), *args[3:])


def refuse_packed() -> None:
    raise TypeError(
        "the model packs its sequences (pack_padded_sequence), whose layout depends on the lengths in one client's "
        "batch: pad them instead, and take every sequence's output at its last step by torch.gather or a mask"
    )


Layer = Callable[[Call], tuple[Tensor, ...]]  # a call of one layer -> its outputs and last states


def by_layer(call: Call, layer: Layer) -> tuple[Tensor, ...]:
    """The outputs and the last states, layer by layer; dropout between layers is F.dropout's."""
    each = len(call.weights) // call.layers
    x, last = call.x, []
    for at in range(call.layers):
        if at and call.dropout:  # examples first: a mask must not depend on how many there are
            x = _first(F.dropout(_first(x, call), call.dropout, call.training), call)
        states = tuple(state[at * call.directions : (at + 1) * call.directions] for state in call.states)
        weights = call.weights[at * each : (at + 1) * each]
        x, *ends = layer(call._replace(x=x, states=states, weights=weights, layers=1, dropout=0.0))
        last.append(ends)
    return x, *(torch.cat(ends) for ends in zip(*last, strict=True))


def _first(x: Tensor, call: Call) -> Tensor:
    """Examples before times, or back again."""
    return x if call.batch_first or x.dim() == 2 else x.transpose(0, 1)


def by_torch(func: Any) -> Layer:
    """One layer as torch computes it."""

    def layer(call: Call) -> tuple[Tensor, ...]:
        states = call.states if STATES[func] == 2 else call.states[0]
        found: tuple[Tensor, ...] = func(call.x, states, *call[2:])
        return found

    return layer


class ByStep(TorchFunctionMode):
    """Within it, LSTMs and GRUs are computed step by step, in operations that can be differentiated in every way.

    torch's fused kernels have neither a forward derivative nor a batched backward pass.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in CELLS:
            return func(*args, **(kwargs or {}))
        return by_layer(arguments(func, args), lambda call: _by_step(call, CELLS[func]))


def _by_step(call: Call, cell: Any) -> tuple[Tensor, ...]:
    """One layer, direction by direction."""
    x = call.x.transpose(0, 1) if call.batch_first and call.x.dim() == 3 else call.x  # [T, B, D]
    each, outs, last = len(call.weights) // call.directions, [], []
    for at in range(call.directions):
        states, weights = [state[at] for state in call.states], call.weights[at * each : (at + 1) * each]
        found = []
        for now in x.flip(0) if at else x:
            states = cell(now, states, weights, call.has_biases)
            found.append(states[0])
        out = torch.stack(found)
        outs.append(out.flip(0) if at else out)
        last.append(states)
    out = torch.cat(outs, -1) if call.bidirectional else outs[0]
    out = out.transpose(0, 1) if call.batch_first and call.x.dim() == 3 else out
    return out, *(torch.stack(ends) for ends in zip(*last, strict=True))


def _lstm_cell(x: Tensor, states: list[Tensor], weights: list[Tensor], has_biases: bool) -> list[Tensor]:
    """Further weight: the projection of h."""
    w, v, *more = weights
    b, a = more[:2] if has_biases else (None, None)
    i, f, g, o = (F.linear(x, w, b) + F.linear(states[0], v, a)).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    projection = more[2:] if has_biases else more
    return [F.linear(h, projection[0]) if projection else h, c]


def _gru_cell(x: Tensor, states: list[Tensor], weights: list[Tensor], has_biases: bool) -> list[Tensor]:
    (w, v), (b, a) = weights[:2], weights[2:] if has_biases else (None, None)
    (xr, xz, xn), (hr, hz, hn) = F.linear(x, w, b).chunk(3, -1), F.linear(states[0], v, a).chunk(3, -1)
    z = (xz + hz).sigmoid()
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return [n + z * (states[0] - n)]


CELLS: dict[Any, Any] = {_VF.lstm: _lstm_cell, _VF.gru: _gru_cell}
