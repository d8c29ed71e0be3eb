"""What a lying client sends: one entry per kind of attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedge import tree
from fedge.attacks import uphill
from fedge.checks import choice, positive
from fedge.core import Params, Payload
from fedge.keys import LIAR, choose, fold

ENROLLED = 1e6  # examples that a weight liar says it has when it joins


class Seen(NamedTuple):
    """The uploads of an ask: which are of liars, which row each is for, and the largest weight that passes, all [J]."""

    lies: Tensor
    rows: Tensor
    most: Tensor


Forge = Callable[[Tensor, Seen, float], Tensor]  # a tensor of all uploads [J, ...] -> the same with lies in it


class Kind(NamedTuple):
    """An attack: how uploads are forged, its usual strength; or data are poisoned, or a loss is climbed."""

    forge: Forge | None
    strength: float
    poisons: bool = False
    says: str = ""
    climbs: bool = False


def _times(factor: float) -> Forge:
    return lambda leaf, seen, strength: _put(leaf, seen, factor * strength * leaf)


def _constant(leaf: Tensor, seen: Seen, strength: float) -> Tensor:
    honest = leaf[~seen.lies] if bool((~seen.lies).any()) else leaf
    return _put(leaf, seen, (strength * honest.double().square().mean().sqrt()).to(leaf.dtype).expand_as(leaf))


def _little(leaf: Tensor, seen: Seen, strength: float) -> Tensor:
    """Mean minus strength times the deviation of the honest, number by number, among those of the same row."""
    found = leaf.clone()
    for row in seen.rows[seen.lies].unique():
        here = seen.rows == row
        honest = leaf[here & ~seen.lies]
        if len(honest) > 1:
            found[here & seen.lies] = honest.mean(0) - strength * honest.std(0, correction=0)
    return found


def _put(leaf: Tensor, seen: Seen, lie: Tensor) -> Tensor:
    return torch.where(seen.lies.view(-1, *[1] * (leaf.dim() - 1)), lie, leaf)


KINDS: dict[str, Kind] = {
    "sign_flip": Kind(_times(-1.0), 1.0, says="the opposite of what it computed"),
    "scaled": Kind(_times(-1.0), 10.0, says="ten times the opposite"),
    "constant": Kind(_constant, 10.0, says="one number everywhere, ten times the size of honest ones"),
    "little": Kind(_little, 1.5, says="a little is enough: the honest mean less 1.5 deviations (Baruch et al. 2019)"),
    "weight_liar": Kind(
        _times(-1.0), 1.0, says="the opposite; it joined with a million examples, and weighs as much as it may"
    ),
    "free_rider": Kind(_times(0.0), 1.0, says="nothing: zeros"),
    "label_flip": Kind(None, 1.0, poisons=True, says="honest work on labels turned round: y becomes C - 1 - y"),
    "ascent": Kind(
        None,
        uphill.LONG,
        climbs=True,
        says="the gradient on the liars' own examples, uphill, 20 times the usual length",
    ),
    "backdoor": Kind(_times(1.0), 2.0, poisons=True, says="work on images with a trigger and one label, twice as long"),
}


@dataclass(frozen=True)
class Attack:
    """A kind of attack and its strength (None: the usual one); forged uploads look like honest ones otherwise."""

    kind: str
    strength: float | None = None

    def __post_init__(self) -> None:
        choice("kind", self.kind, KINDS)
        positive("strength", self.strength, optional=True)

    @property
    def poisons(self) -> bool:
        return KINDS[self.kind].poisons

    @property
    def climbs(self) -> bool:
        return KINDS[self.kind].climbs

    def forged(
        self, uploads: Payload, weights: Tensor, seen: Seen, slopes: Params | None = None
    ) -> tuple[Payload, Tensor]:
        """All uploads [J, ...] and their weights as the server gets them; `slopes` are of liars that climb."""
        kind = KINDS[self.kind]
        strength = kind.strength if self.strength is None else self.strength
        forge = kind.forge
        if forge is not None:
            uploads = {
                name: tree.map_(lambda leaf: forge(leaf, seen, strength) if leaf.is_floating_point() else leaf, part)
                for name, part in uploads.items()
            }
        if slopes is not None:
            uploads = {
                name: uphill.against(part, seen.lies, seen.rows, slopes, strength)
                if part.keys() == slopes.keys()
                else part
                for name, part in uploads.items()
            }
        claimed = torch.where(seen.lies, seen.most.to(weights), weights) if self.kind == "weight_liar" else weights
        return uploads, claimed.to(weights.dtype)


def attackers(clients: int, share: float, seed: int) -> list[int]:
    """Who lies: round(share * clients) of them, by address."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"share is {share!r}, it must be at least 0 and at most 1: the share of clients that lie")
    count = round(share * clients)
    chosen: list[int] = choose(fold(seed, LIAR), clients, count).tolist() if count else []
    return chosen
