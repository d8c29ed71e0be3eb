"""From a checked experiment to what training takes: a federation and algorithms with their models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from fedge import inputs, preflight
from fedge.algorithms.asynchronous import Asynchronous, Late
from fedge.checks import at_least_one
from fedge.core import Algorithm
from fedge.data import Data, load
from fedge.edge.clock import check_apart, chosen
from fedge.edge.devices import Fleet
from fedge.edge.policies import FirstOf
from fedge.edge.settings import Edge
from fedge.edge.table import Table as DeviceFile
from fedge.engine import BaseLink
from fedge.engine.hardware.budget import is_out_of_memory
from fedge.engine.runtime import Runtime
from fedge.experiment.device import find
from fedge.experiment.errors import ExperimentError, at
from fedge.experiment.fields import Table, fields_of
from fedge.experiment.labels import place
from fedge.experiment.own import Own, said
from fedge.experiment.parsing import Experiment, inside
from fedge.experiment.parts import ALGORITHM, DATA, MODEL, PARTITION, wraps
from fedge.experiment.training import observe_of
from fedge.experiment.values import made
from fedge.federation import Federation
from fedge.handle import Handle, parameters
from fedge.loop import cohorts
from fedge.once import is_new
from fedge.problem import check_metrics, problem_of

log = logging.getLogger("fedge")


@dataclass(frozen=True)
class Setup:
    """Everything training needs, made and checked."""

    federation: Federation
    algorithms: Mapping[str, Algorithm[Any]]  # by label
    train: Table  # `train`'s own arguments, the device found
    edge: Edge | None = None

    def clocked(self, link: BaseLink) -> BaseLink:
        """The link with the devices and the virtual clock of [edge] around it, where there is such a table."""
        return link if self.edge is None else self.edge.clock(link, self.federation)


def build(experiment: Experiment, data: Data | Federation | None = None, federation: Federation | None = None) -> Setup:
    """Load the data unless they are given, deal them out, make the models; what is impossible is an error here."""
    device = find(experiment.train["device"])
    if federation is None:
        data = load_data(experiment.data) if data is None else data
        federation = deal(experiment.partition, data)
    check_train(experiment.train, federation)
    algorithms, edge = build_algorithms(experiment, federation), _edge(experiment, federation)
    for label, algorithm in algorithms.items():
        check_clock(experiment, algorithm, label)
        check_private(edge, algorithm, federation, label)
        check_run(experiment, algorithm, federation, label)
        check_problem(experiment, algorithm, federation, label)
    return Setup(federation, algorithms, experiment.train | {"device": device}, edge)


def check_clock(experiment: Experiment, algorithm: Algorithm[Any], where: str) -> None:
    """Said before there is a folder: a server that does not wait needs to know who answers when."""
    inside = algorithm
    while not isinstance(inside, Asynchronous) and hasattr(inside, "inner"):
        inside = inside.inner
    if isinstance(inside, Asynchronous) and Late.of(algorithm) is None:
        outer, name = type(algorithm).__name__, type(inside).__name__
        raise ExperimentError(f"{where}: {outer} needs rounds, and {name} has none: only Averaged goes around it")
    if (late := Late.of(algorithm)) is None:
        return
    name, edge = type(late.algorithm).__name__, edge_of(experiment.edge)
    if edge is None:
        raise ExperimentError(f"{where}: {name} needs to know who answers when: add a table [edge], see docs/edge.md")
    if given := chosen(edge.policy, edge.choose, "choose"):
        raise ExperimentError(f"{where}: {name} waits for nobody, but in [edge] {given}: leave it out")


def check_private(edge: Edge | None, algorithm: Algorithm[Any], federation: Federation, where: str) -> None:
    """Said before there is a folder: with these devices one client may decide whether another one's answer counts."""
    if edge is not None and algorithm.privacy() is not None:
        with at(f"{where}, [edge]"):
            check_apart(edge.fleet(federation.clients), chosen(edge.policy, edge.choose, "choose"), edge.stay)


def check_run(experiment: Experiment, algorithm: Algorithm[Any], federation: Federation, where: str) -> None:
    """Said before there is a folder: rounds, or a draw of cohorts, of which nothing can come."""
    table = experiment.train
    if not isinstance(algorithm, Algorithm):
        return  # `train` says what it needs
    with at(where):
        algorithm.check_run(table["rounds"], table["cohort"] or federation.clients, table["sampling"] or "fixed")


def check_problem(experiment: Experiment, algorithm: Algorithm[Any], federation: Federation, where: str) -> None:
    """Said before there is a folder: a loss, metrics or a target that do not fit what is learnt."""
    y = federation.data.train_y
    if not hasattr(algorithm, "loss"):
        return  # `train` says that it needs one
    with at("train"):
        check_metrics(observe_of(experiment.train).functions, y, algorithm.loss)
    if experiment.target is not None and problem_of(y, algorithm.loss).kind == "numbers":
        raise ExperimentError(
            f"target is {experiment.target:g}, but a target is a test accuracy, and a regression has none: leave it "
            'out; until = {name = "reached", value = 0.9, metric = "test_r2"} in [train] ends a run that is good enough'
        )
    with at(where):
        params = parameters(algorithm.model)
        dtype = next(iter(params.values())).dtype
        few = inputs.cast(inputs.take(federation.data.train_x, slice(2)), dtype)
        targets = inputs.cast(y, dtype) if y.is_floating_point() else y
        handle, cpu = Handle(algorithm.model, algorithm.loss), torch.device("cpu")
        preflight.check_model(algorithm, Runtime(handle, cpu, few, targets, dtype=dtype), params)


def _edge(experiment: Experiment, federation: Federation) -> Edge | None:
    """The devices, if there are any; a file of devices is read here."""
    edge = edge_of(experiment.edge)
    with at("edge"):
        if edge is not None:
            _say_rows(edge.fleet(federation.clients))
            if edge.choose is not None and experiment.train["sampling"] == "poisson":
                raise ValueError(
                    f"choose is {edge.choose!r}, which takes cohorts of a fixed size, but sampling in [train] is "
                    "'poisson': leave out one of them"
                )
            cohort = experiment.train.get("cohort") or federation.clients
            if isinstance(edge.policy, FirstOf) and edge.policy.count > cohort:
                raise ValueError(
                    f"policy: count is {edge.policy.count}, but {cohort} clients are asked in a round: lower it, raise "
                    "cohort in [train], or leave the policy out to wait for all"
                )
    return edge


def _say_rows(fleet: Fleet) -> None:
    """A file of devices that has not one row per client: said once."""
    told = fleet.told if isinstance(fleet, DeviceFile) else ""
    if told and is_new(told):
        log.warning(told)


def edge_of(table: Table | None) -> Edge | None:
    """The table [edge] as what it stands for."""
    if table is None:
        return None
    hints = fields_of(Edge)
    with at("edge"):
        return Edge(**{key: made(value, hints[key].hint) for key, value in table.items()})


def load_data(table: Table) -> Data | Federation:
    """What the table names; a function of the user's own may give clients with their examples."""
    if (key := DATA.own_key(table)) is None:
        with at("data"):
            return load(**table)
    found = call_own(table[key], DATA.chosen(table, "data"), "data", {k: v for k, v in table.items() if k != key})
    if not isinstance(found, Data | Federation):
        raise ExperimentError(
            f"data: {table[key]} gave a {type(found).__name__}, expected fedge.data.from_arrays(...) or a "
            "fedge.Federation"
        )
    return found


def deal(table: Table, data: Data | Federation) -> Federation:
    """Partition the training examples of `data`, unless they came with their clients."""
    if isinstance(data, Federation):
        if table:
            raise ExperimentError("partition: the data come with their clients already: leave out [partition]")
        return data
    if not table:
        raise ExperimentError("partition: the data come without clients: add a table [partition] with a kind")
    options = {key: value for key, value in table.items() if key != "kind"}
    chosen = PARTITION.chosen(table, "partition")
    given = {"data": data} if "data" in fields_of(chosen) else {"y": data.train_y} if "y" in fields_of(chosen) else {}
    if (key := PARTITION.own_key(table)) is not None:
        clients = call_own(table[key], chosen, "partition", given | options)
    else:
        with at("partition"):
            clients = chosen(**given, **options)
    with at("partition"):
        return Federation(data, clients)


def call_own(name: Own, thing: Callable[..., Any], where: str, options: Table) -> Any:
    """What a part of the user's own gives; its errors say which part it was, and their cause has the rest."""
    try:
        return thing(**options)
    except ExperimentError:
        raise
    except Exception as error:
        raise ExperimentError(f"{where}: {name} raised {said(error, name.path)}") from error


def check_train(table: Table, federation: Federation) -> None:
    with at("train"):
        for name in ("rounds", "evaluate_every", "checkpoint_every"):
            at_least_one(name, table[name])
        cohorts(federation.clients, table["cohort"])
        observe_of(table)


def build_algorithms(experiment: Experiment, federation: Federation) -> dict[str, Algorithm[Any]]:
    """By label, each with a model of its own."""

    def model(outputs: int) -> nn.Module:
        return make_model(experiment.model, federation.data, outputs)

    numbered = enumerate(experiment.algorithm, 1)
    cohort, seed = experiment.train["cohort"], experiment.train.get("seed")
    made = [
        make_algorithm(table, place(n, table), federation, model, cohort=cohort, seed=seed) for n, table in numbered
    ]
    return dict(zip(experiment.labels, made, strict=True))


def make_model(table: Table, data: Data, outputs: int) -> nn.Module:
    """The model, as wide as the data at both ends, and tried on one example."""
    first = inputs.take(data.train_x, slice(1))
    model = _made_model(table, {"inputs": inputs.numel(first), "outputs": outputs})
    try:
        with torch.no_grad():
            args, named = inputs.arguments(first)
            model(*args, **named)
    except Exception as error:
        raise ExperimentError(
            f"model: {table['name']} does not take examples of {inputs.described(first)}: {_line(error)}"
        ) from error
    return model


def _made_model(table: Table, ends: Table) -> nn.Module:
    build = MODEL.chosen(table, "model")
    known = fields_of(build)
    options = {key: value for key, value in table.items() if key != "name"}
    options |= {key: ends[key] for key in ends if key in known}
    if (key := MODEL.own_key(table)) is None:
        try:
            with at("model"):
                model: nn.Module = build(**options)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ExperimentError(
                f"model: there is no memory for {table['name']} of this size: make it smaller"
            ) from None
        return model
    seed = options["seed"] if "seed" in known else options.pop("seed")
    with torch.random.fork_rng(devices=[]):  # the caller's generator is left as it was
        torch.manual_seed(seed)
        found = call_own(table[key], build, "model", options)
    if not isinstance(found, nn.Module):
        raise ExperimentError(f"model: {table[key]} gave a {type(found).__name__}, expected an nn.Module")
    return found


def make_algorithm(
    table: Table,
    where: str,
    federation: Federation,
    model: Callable[[int], nn.Module],
    outputs: int | None = None,
    cohort: int | None = None,
    seed: int | None = None,
) -> Algorithm[Any]:
    """An algorithm around a model, or around the algorithm that it wraps; `outputs` are what a wrapper wants inside."""
    kind = ALGORITHM.chosen(table, where)
    hints = {key: field.hint for key, field in fields_of(kind).items()}
    given = {key: value for key, value in table.items() if key not in ("name", "label", "inner")}
    if "classes" in hints:
        given.setdefault("classes", federation.data.classes)
    if "clients" in hints and outputs is None and not given.get("weighted"):  # one number serves no class by itself
        given.setdefault("clients", federation.clients)
    if "expected" in hints:
        given.setdefault("expected", cohort or federation.clients)
    if "seed" in hints and seed is not None:  # one of the user's own that draws by itself
        given.setdefault("seed", seed)
    if wraps(kind, table):
        wanted = getattr(kind, "inner_outputs", None) or outputs
        within = inside(where, table["inner"])
        given["inner"] = make_algorithm(table["inner"], within, federation, model, wanted, cohort, seed)
    else:
        given["model"] = model(outputs or _outputs(federation.data))
    with at(where):
        algorithm: Algorithm[Any] = kind(**{key: made(value, hints[key]) for key, value in given.items()})
    return algorithm


def _outputs(data: Data) -> int:
    """One per class, or one per target of a regression."""
    return data.classes or prod(data.train_y.shape[1:])


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
