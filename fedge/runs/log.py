"""The log: keeps a run folder in step with a run."""

from __future__ import annotations

import dataclasses
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedge.core import Algorithm, Codec, Combine, S
from fedge.engine.hardware.budget import peak
from fedge.engine.links.base_link import BaseLink
from fedge.federation import Federation
from fedge.handle import parameters
from fedge.ledger import Row
from fedge.runs import checkpoint, health
from fedge.runs.differences import as_plain, first_difference
from fedge.runs.examples import are_same, checksum
from fedge.runs.folder import BEST, RunFolder, RunFolderError, versions, way_back
from fedge.runs.keepable import keepable
from fedge.runs.run import Kept, Record, Run, absurd

log = logging.getLogger("fedge")


@dataclasses.dataclass(frozen=True)
class About:
    """What a run is called, and the configuration it came from (None: one is made from the arguments)."""

    name: str | None = None
    config: Mapping[str, Any] | None = None


class Log:
    """Keeps a run folder in step with a run. Of several processes one writes; the others are told what it read."""

    def __init__(
        self,
        folder: RunFolder,
        config: Mapping[str, Any],
        name: str,
        link: BaseLink,
        every: int,
        examples: Tensor | None,
    ) -> None:
        self.examples = examples
        self.folder, self.config, self.name, self.link, self.every = folder, config, name, link, every
        self.group, self.saved, self.chosen = link.runtime.group, -1, link.settings()
        self.new: Kept[Any] | None = None  # a best round that no checkpoint has yet
        self.by = ("", "")  # the metric that found it, and whether the largest or the smallest is best
        self.sound = False  # whether the checkpoint that is there is known to be of use: a sound round came from it
        self.first = 0.0  # the largest parameter at the beginning

    @contextmanager
    def held(self, resume: bool) -> Iterator[None]:
        """Nobody else writes into the folder; of several processes the first one sees to it."""
        with ExitStack() as stack:
            self.group.first(lambda: self._hold(stack, resume))
            yield

    def _hold(self, stack: ExitStack, resume: bool) -> None:
        if resume and not self.folder.path.is_dir():
            raise RunFolderError(f"there is no run to resume at {self.folder.path}")
        stack.enter_context(self.folder.held())

    def create(self, federation: Federation, run: Run[Any]) -> None:
        """The folder, with a first checkpoint: if that can be written, so can the later ones."""
        remembered = self.link.remembered(run.rounds)
        self.group.first(lambda: self._create(federation, run, remembered))
        self.saved, self.first = run.rounds, health.largest(run.params)
        self.sound = True

    def _create(self, federation: Federation, run: Run[Any], remembered: Mapping[str, Any]) -> None:
        self.folder.create(self.config, federation, self.link.about())
        self.folder.append(run.history, run.ledger.rows)
        self._save(run, remembered)

    @property
    def resumable(self) -> bool:
        """False when the run was ended so early that it has to start over."""
        return self.group.first(lambda: self.folder.begun)

    def reopen(self, algorithm: Algorithm[S], rounds: int) -> Run[S]:
        """The run as its checkpoint has it; `rounds` is how many it shall have in the end."""
        content, records, rows = self.group.first(lambda: self._reopen(rounds))
        with self.usable():
            self.link.restore(content["engine"])
        runtime = self.link.runtime
        state = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(runtime.device), content["state"])
        self.link.begin(rows)
        self.saved = content["round"]
        memory = content.get("clients", {})
        run = Run(algorithm, state, runtime.handle, records, self.link.ledger, memory, example=runtime.example)
        self.first = health.largest(parameters(algorithm.model))
        with self.usable():
            proven = self.group.leads and self.folder.file("good.pt").exists()  # it stays until this one is proven
            self.sound = not proven and health.is_sound(records, absurd(algorithm))
        return run

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Errors in it are those of a checkpoint whose parts are not what this run would have written."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise RunFolderError(
                f"cannot resume {self.folder.path}: its checkpoint is damaged, or of another algorithm or version "
                f"({what}); start another run"
            ) from error

    def _reopen(self, rounds: int) -> tuple[dict[str, Any], list[Record], list[Row]]:
        content = self.folder.reopen(self.config)
        known = content.get("examples")  # a run from before has none
        if known is not None and self.examples is not None and not are_same(known, self.examples):
            raise RunFolderError(
                f"cannot resume {self.folder.path}: its clients held other examples than these, or its test set was "
                "another; restore the data, or start another run"
            )
        if content["round"] > rounds:
            there = f"{self.folder.path} has {content['round']} rounds already"
            raise RunFolderError(f"{there}, {rounds} were asked for: ask for as many or more")
        self.folder.write_config(self.config)
        records, rows = self.folder.truncate(content)
        return content, records, rows

    def round(self, run: Run[Any], record: Record, rows: list[Row]) -> None:
        if self.group.leads:
            self.folder.append([record], rows)
        if health.is_evaluated(record) and "skipped" not in record and self._sound(run):
            self.sound = True  # the checkpoint before it, from which it came
        # A choice that was made meanwhile is saved at once: a run that goes on has to make it again.
        chose = self.group.size == 1 and self.link.settings() != self.chosen
        if record["round"] % self.every == 0 or chose:
            self.save(run)

    def save(self, run: Run[Any]) -> None:
        """A checkpoint; what clients remember is collected from all processes."""
        remembered = self.link.remembered(run.rounds)
        if self.group.leads:
            if self.sound:
                self.folder.keep_good()
            if self.new is not None:
                self.folder.save_best(self._best(self.new))
            self._save(run, remembered)
            if self.new is not None:
                self.folder.settle_best(run.rounds)
        self.new = None
        self.saved = run.rounds
        self.sound = not run.history  # a lie in a control or a momentum shows in the next round at the earliest

    def _sound(self, run: Run[Any]) -> bool:
        return health.is_sound(run.history, absurd(run.algorithm)) and not health.has_grown(run.params, self.first)

    def _save(self, run: Run[Any], remembered: Mapping[str, Any]) -> None:
        content = {"config": as_plain(self.config), "round": run.rounds, "state": run.state}
        content |= {"clients": dict(remembered)} if remembered else {}
        content |= {} if self.examples is None else {"examples": self.examples}
        self.chosen = self.link.settings()
        self.folder.save(keepable(content | {"engine": self.chosen}))

    def keep(self, kept: Kept[Any], by: tuple[str, str]) -> None:
        """The best round so far: it has a file of its own from the next checkpoint on, which has its round."""
        self.new, self.by = kept, by

    def _best(self, kept: Kept[Any]) -> dict[str, Any]:
        about = {"config": as_plain(self.config), "round": kept.round, "metric": self.by[0], "best": self.by[1]}
        return keepable(about | {"value": kept.value, "state": kept.state})

    def kept(self, run: Run[S], values: Mapping[int, float]) -> Kept[S] | None:
        """The round that was kept before the run was resumed, if it still has it; a later one will come again.

        `values` are how good the rounds on record are, by the metric that counts now.
        """
        if not self.group.leads:
            return None
        self.folder.settle_best(run.rounds)
        found = self._kept(run, values) if self.folder.file(BEST).is_file() else None
        top = max(values, key=lambda round: (values[round], -round), default=None)
        if top is not None and (found is None or values[top] > found.value):
            log.warning(
                "%s: round %d is the best so far by what counts now, but its model was not kept: %s",
                self.folder.path,
                top,
                "there is none yet" if found is None else f"{BEST} is that of round {found.round}",
            )
        return found

    def _kept(self, run: Run[S], values: Mapping[int, float]) -> Kept[S] | None:
        try:
            content = checkpoint.load(self.folder.file(BEST))
            round, device = int(content["round"]), self.link.runtime.device
            difference = first_difference(content["config"], as_plain(self.config))
            state = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), content["state"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise RunFolderError(f"cannot resume {self.folder.path}: {BEST} is damaged ({why}): remove it") from error
        if difference is not None:
            name, old, new = difference
            raise RunFolderError(
                f"cannot resume {self.folder.path}: {BEST} is of another run, with {name} = {old!r}, here it is "
                f"{new!r}: remove it"
            )
        return Kept(round, values[round], state) if round in values else None

    def end(self, run: Run[Any]) -> None:
        """A last checkpoint and, unless the run was stopped, the summary."""
        if self.saved != run.rounds:
            self.save(run)
        run.way_back = self.group.first(lambda: self._way_back(run))
        if run.way_back and self.group.leads and not run.stopped and run.diverged is None:
            log.warning("%s: the run ends far from its best, or with huge parameters%s", self.folder.path, run.way_back)
        if self.group.leads and not run.stopped:
            device = self.link.runtime.device
            label = self.config.get("algorithm", {}).get("label", type(run.algorithm).__name__)
            about = {"name": self.name, "algorithm": label, "device": str(device), "versions": versions()}
            about["peak_memory_bytes"] = peak(device)
            self.folder.finish(about | run.summary())

    def _way_back(self, run: Run[Any]) -> str:
        """How to go on from before things went wrong; nothing if the newest checkpoint is as good as any."""
        if self._sound(run) and not (run.stopped and health.is_stuck(run.history)):
            self.folder.drop_good()
            return ""
        return way_back(self.folder.path)


def open_log(out: Path | str | None, about: About, link: BaseLink, every: int, examples: Tensor | None) -> Log | None:
    """The log of a run folder; `examples` is the fingerprint of the data, None if it is not to be kept."""
    if out is None:
        return None
    folder = RunFolder(out)
    return Log(folder, about.config or {}, about.name or folder.path.name, link, every, examples)


def describe(algorithm: Algorithm[Any], federation: Federation, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for a run that was started from Python: plain values, and a checksum of who holds what."""
    who = {"clients": federation.clients, "examples": len(federation.index), "checksum": checksum(federation)}
    return {"algorithm": fields(algorithm), "federation": who, "train": dict(settings)}


def _model(module: nn.Module) -> str:
    """The kind of network, and a checksum of its layers and of everything in it that is not trained."""
    checksum = zlib.crc32(repr(module).encode())
    fixed = [p for p in module.parameters() if not p.requires_grad] + list(module.buffers())
    for part in fixed:
        checksum = zlib.crc32(part.detach().cpu().contiguous().numpy().tobytes(), checksum)
    count = sum(p.numel() for p in module.parameters())
    return f"{type(module).__name__} with {count} parameters, checksum {checksum}"


def fields(thing: Any) -> dict[str, Any]:
    """An algorithm or a part of one as plain values."""
    found: dict[str, Any] = {"name": type(thing).__name__.lower()}
    for one in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        value = getattr(thing, one.name)
        if isinstance(value, nn.Module):
            found[one.name] = _model(value)
        elif dataclasses.is_dataclass(value):
            found[one.name] = fields(value)
        elif isinstance(value, Codec | Combine) or repr(value) == object.__repr__(value):  # else an address is written
            found[one.name] = {"name": type(value).__name__.lower(), **vars(value)}
        elif callable(value):
            found[one.name] = getattr(value, "__name__", type(value).__name__)
        else:
            found[one.name] = value
    return found
