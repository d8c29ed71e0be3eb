"""`train`: its arguments are checked, then made into a training that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedge import preflight
from fedge.checks import at_least_one
from fedge.core import Algorithm, S
from fedge.engine import Engine, RankError
from fedge.engine.links.base_link import BaseLink
from fedge.engine.links.nobody import Nobody
from fedge.evaluate import problem_at
from fedge.federation import Federation
from fedge.hooks import Observe
from fedge.loop.drawing import Draw, Sampling, cohorts
from fedge.loop.training import Training
from fedge.metrics import Metric, named
from fedge.per_client import Jury
from fedge.problem import check_metrics
from fedge.runs.examples import are_same, fingerprint
from fedge.runs.folder import RunFolderError
from fedge.runs.log import About, Log, describe, open_log
from fedge.runs.run import Record, Run


def train(
    algorithm: Algorithm[S],
    federation: Federation,
    *,
    rounds: int,
    cohort: int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    out: Path | str | None = None,
    start: Run[S] | None = None,
    resume: bool = False,
    engine: Engine | None = None,
    observe: Observe | None = None,
    metrics: Mapping[str, Metric | str] | Sequence[str] | None = None,
    link: BaseLink | None = None,
    about: About | None = None,
    on_round: Callable[[Record], None] | Iterable[Callable[[Record], None]] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Run[S]:
    """Train for so many rounds with `cohort` clients in each (None: all of them), and evaluate.

    With `sampling` "poisson" every client is drawn by itself, `cohort` of them on average; a round that finds nobody is
    skipped. "fixed" is exactly `cohort`, None what the algorithm needs: "poisson" for Private, "fixed" for others.

    `start` goes on from an earlier run: its state, its history, its round numbers; 10 rounds and 10 more are the
    20 of one run. `out` is a run folder; with `resume` the run in it goes on from its checkpoint until it has `rounds`
    rounds, and ends as if it had never stopped. `engine` says how clients are simulated (`device` alone is short for
    Engine(device)), `observe` how often the run is evaluated and saved, with which metrics, and when it is enough;
    `metrics`, such as ["f1"] or {"mine": function}, is short for Observe(metrics=...). Another `link` carries the
    phases elsewhere. `on_round` is one function of a round's record, or several.
    `stop` is asked before every phase: if it says so, training ends at the last complete round.
    On a link of several processes (`Ranks`) rank 0 alone evaluates, writes, and is told of rounds.
    """
    preflight.check_arguments(algorithm, federation, seed)
    observe = _observing(observe, metrics, algorithm, federation)
    at_least_one("rounds", rounds)
    privacy = algorithm.privacy()
    sampling = sampling or ("fixed" if privacy is None else "poisson")
    trains = observe.evaluate_train or (observe.per_client and federation.test is None)
    preflight.check_privacy(privacy, federation.clients, cohort, sampling, trains, link)
    _check_resume(resume, start, out)
    draw = cohorts(federation.clients, cohort, sampling, privacy.secret if privacy else None)
    algorithm.check_run(rounds + (0 if start is None else start.rounds), cohort or federation.clients, sampling)
    if link is None:
        link = _engine(engine, device).expecting(algorithm, rounds).link(algorithm, federation, rounds=rounds)
    preflight.check_link(algorithm, link)
    draw = _chosen(link, federation.clients, cohort, sampling) or draw
    link = Nobody(link) if sampling == "poisson" else link
    examples = _examples(link, federation, kept=out is not None)
    about = about or About()
    if about.config is None and out is not None:
        settings = {"rounds": rounds, "cohort": cohort, "seed": seed, **observe.settings()}
        settings |= {"sampling": sampling} if sampling != "fixed" else {}
        about = replace(about, config=describe(algorithm, federation, settings))
    # Exact sums over the examples have no place beside noise.
    log = open_log(out, about, link, observe.checkpoint_every, examples if privacy is None else None)
    training = _training(algorithm, federation, link, log, seed, cohort, draw, observe, on_round)
    with nullcontext() if log is None else log.held(resume):
        run, last = training.open(federation, start, resume, rounds)
        run.problem = problem_at(algorithm, run.handle, link.runtime.x, federation.data.train_y, federation.data.values)
        run.classes = federation.data.called
        with link.working():
            training.rounds(run, last, stop)
    if link.runtime.group.leads and not run.stopped:
        preflight.say_unmoved(run.history)
    return run


def _observing(
    observe: Observe | None,
    metrics: Mapping[str, Metric | str] | Sequence[str] | None,
    algorithm: Algorithm[Any],
    federation: Federation,
) -> Observe:
    """What is observed, with the metrics that were given beside it; each fits what is learnt."""
    y, found = federation.data.train_y, observe or Observe()
    check_metrics(metrics or (), y, algorithm.loss)
    if metrics is not None:
        found = replace(found, metrics=named(found.metrics) | named(metrics))
    check_metrics(found.functions, y, algorithm.loss)
    return found


def _training(
    algorithm: Algorithm[S],
    federation: Federation,
    link: BaseLink,
    log: Log | None,
    seed: int,
    cohort: int | None,
    draw: Draw,
    observe: Observe,
    on_round: Callable[[Record], None] | Iterable[Callable[[Record], None]] | None,
) -> Training[S]:
    """Of several processes one alone evaluates and is told of rounds."""
    leads = link.runtime.group.leads
    return Training(
        algorithm,
        link,
        log,
        seed,
        cohort or federation.clients,
        draw,
        Jury(federation, link.runtime, observe) if leads else None,
        observe.evaluate_every,
        () if not leads or on_round is None else (on_round,) if callable(on_round) else tuple(on_round),
        observe.until,
        observe.best,
        federation.name if federation.names else None,
    )


def _check_resume(resume: bool, start: Run[Any] | None, out: Path | str | None) -> None:
    if resume and start is not None:
        raise ValueError("give either start (a Run) or resume (a run folder), not both")
    if resume and out is None:
        raise RunFolderError("resume needs the run folder to go on from: give `out`")


def _examples(link: BaseLink, federation: Federation, kept: bool) -> Tensor | None:
    """Which examples these are, if a run folder keeps that or several processes have loaded them, each for itself."""
    group = link.runtime.group
    if not kept and group.size == 1:
        return None
    first, *others = group.gather(fingerprint(federation))
    for rank, one in enumerate(others, 1):
        if not are_same(first, one):
            raise RankError(f"rank {rank} has other examples than rank 0: give every process the same data")
    return first


def _chosen(link: BaseLink, clients: int, cohort: int | None, sampling: Sampling) -> Draw | None:
    """How a link chooses cohorts, if it does."""
    found = link.choosing(clients, cohort or clients)
    if found is not None and sampling != "fixed":
        raise ValueError(
            f"sampling is {sampling!r}, but the link chooses cohorts by itself, of a fixed size: leave out sampling, "
            "or what the link chooses by (`choice` of a Clock, choose in [edge])"
        )
    return found


def _engine(engine: Engine | None, device: torch.device | str | None) -> Engine:
    if engine is None:
        return Engine(device="cpu" if device is None else str(device))
    if device is not None:
        raise ValueError(
            f"device is {str(device)!r} and there is an engine as well: write Engine(device={str(device)!r})"
        )
    return engine
