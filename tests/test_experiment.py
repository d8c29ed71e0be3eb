"""Experiment files: every field checked, overridden, built, run, resumed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedge
from fedge import toml
from fedge.algorithms import ALGORITHMS, FedAvg
from fedge.checks import unit_interval
from fedge.core import Algorithm, At
from fedge.experiment import (
    Experiment,
    ExperimentError,
    Meter,
    Progress,
    Watch,
    build,
    compare,
    load,
    load_federation,
    parse,
    plan,
    run_folders,
    slug,
)
from fedge.experiment import device as devices
from fedge.experiment.override import override
from fedge.experiment.planning import read
from fedge.experiment.values import Mismatch, convert, expected, is_plain
from fedge.loop import cohorts
from fedge.runs.folder import RunFolderError

SMALL = """
name = "small"

[data]
name = "digits"

[partition]
kind = "iid"
clients = 10

[model]
name = "mlp"
hidden = [4]

[train]
rounds = 4
cohort = 3

[[algorithm]]
name = "fedavg"
epochs = 1
batch_size = "none"

[[algorithm]]
name = "fedavg"
label = "With momentum"
epochs = 1
momentum = 0.5
"""


@dataclass(frozen=True, eq=False)
class Outer:
    """The shape of a wrapper: `inner` first, `classes` from the data, two outputs inside."""

    inner: Algorithm[Any]
    classes: int = 3
    beta: float = 0.5

    inner_outputs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        unit_interval("beta", self.beta)


def tables(*settings: str, text: str = SMALL) -> dict[str, Any]:
    return override(tomllib.loads(text), settings)


def small(*settings: str) -> Experiment:
    return parse(tables(*settings))


def message(*settings: str, text: str = SMALL) -> str:
    with pytest.raises(ExperimentError) as caught:
        build(parse(tables(*settings, text=text)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Fields and defaults


def test_defaults_are_those_of_the_functions_and_dataclasses() -> None:
    experiment = small()
    assert experiment.partition == {"kind": "iid", "clients": 10, "seed": 0}
    assert experiment.model == {"name": "mlp", "seed": 0, "hidden": (4,)}
    assert experiment.train["evaluate_every"] == 1
    assert experiment.train["device"] == "auto"
    first = experiment.algorithm[0]
    assert first["batch_size"] is None
    assert first["lr"] == FedAvg(nn.Linear(1, 1)).lr
    assert "loss" not in first
    assert "model" not in first


def test_the_model_follows_the_seed_of_training() -> None:
    assert small("train.seed=7").model["seed"] == 7
    assert small("train.seed=7", "model.seed=1").model["seed"] == 1


def test_what_is_written_reads_back_as_the_same_experiment() -> None:
    experiment = small("target=0.9")
    assert parse(tomllib.loads(toml.dump(experiment.table()))) == experiment
    alone = parse(tomllib.loads(toml.dump(experiment.config("With momentum"))))
    assert alone.algorithm == experiment.algorithm[1:]


def test_one_algorithm_may_be_a_plain_table() -> None:
    text = SMALL.split("[[algorithm]]")[0] + '[algorithm]\nname = "fedavg"\n'
    assert parse(tables(text=text)).labels == ["fedavg"]


def test_labels_are_made_distinct() -> None:
    assert small("algorithm.label=Same").labels == ["Same", "Same 2"]
    assert small("algorithm.2.label=FedAvg!").labels == ["fedavg", "FedAvg! 2"], "their folders would be the same"


def test_algorithms_of_one_name_are_labelled_by_what_differs() -> None:
    def labels(*algorithms: dict[str, Any]) -> list[str]:
        return parse(tomllib.loads(SMALL) | {"algorithm": list(algorithms)}).labels

    one: dict[str, Any] = {"name": "fedavg"}
    assert labels(one, one | {"lr": 0.5}) == ["fedavg lr=0.1", "fedavg lr=0.5"], "a default is a value too"
    assert labels(one | {"batch_size": "none"}, one) == ["fedavg batch_size=none", "fedavg batch_size=15"]
    assert labels(one | {"lr": 0.5}, one | {"lr": 0.5, "epochs": 2}, one) == [
        "fedavg lr=0.5 epochs=5",
        "fedavg lr=0.5 epochs=2",
        "fedavg lr=0.1",
    ]
    assert labels(one, one) == ["fedavg", "fedavg 2"], "nothing differs"
    assert labels(one, one | {"label": "mine", "lr": 0.5}) == ["fedavg", "mine"]
    ova = [{"name": "fedova", "inner": {"name": name}} for name in ("fedavg", "fisher_lbfgs")]
    assert labels(*ova) == ["fedova inner=fedavg", "fedova inner=fisher_lbfgs"]


def test_a_file_without_a_name_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "my study.toml"
    path.write_text(SMALL.replace('name = "small"\n', "", 1))
    assert load(path).name == "my study"


def test_the_embedded_experiment_is_complete() -> None:
    experiment = load()
    assert experiment.name == "digits"
    assert experiment.target == 0.85
    assert build(experiment).federation.clients == 100


@pytest.mark.parametrize(
    ("hint", "value", "found"),
    [
        (float, 1, 1),
        (int | None, "none", None),
        (int | None, 3, 3),
        (tuple[float, float], [0.9, 1], (0.9, 1)),
        (tuple[int, ...], [], ()),
        (Sequence[int], [1, 2], (1, 2)),
        (list[str], ["a"], ["a"]),
        (torch.device | str, "cpu", "cpu"),
    ],
)
def test_values_become_their_declared_type(hint: Any, value: Any, found: Any) -> None:
    assert is_plain(hint)
    assert convert(value, hint) == found
    assert type(convert(value, hint)) is type(found)


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (int, True, "a whole number"),
        (int, 1.0, "a whole number"),
        (float, "0.1", "a number"),
        (bool, 1, "true or false"),
        (str, 3, "a string"),
        (int, "none", "a whole number"),
        (float | None, "no", 'a number or "none"'),
        (tuple[float, float], [0.9], "a list of 2 numbers"),
        (Sequence[int], [1, "2"], "a list of whole numbers"),
        (Sequence[int], 32, "a list of whole numbers"),
    ],
)
def test_values_of_another_type_are_refused(hint: Any, value: Any, words: str) -> None:
    with pytest.raises(Mismatch):
        convert(value, hint)
    assert expected(hint) == words


# Errors: where, what, and what it should be


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trian.rounds=3", "unknown table 'trian' (did you mean 'train'?)"),
        ("targt=0.9", "unknown key 'targt' (did you mean 'target'?)"),
        ("train.round=3", "train: unknown key 'round' (did you mean 'rounds'?)"),
        ("train.zzz=3", "train: unknown key 'zzz', known are rounds, cohort, sampling, seed"),
        ("train.out=there", "train: out follows from the rest of the experiment: leave it out"),
        ("train.link=x", "train: unknown key 'link'"),
        ("train.rounds=ten", "train: rounds is 'ten', expected a whole number"),
        ("train.rounds=true", "train: rounds is True, expected a whole number"),
        ("train.rounds=0", "train: rounds is 0, it must be a whole number of at least 1"),
        ("train.cohort=11", "train: cohort is 11, but there are only 10 clients: lower it to at most 10"),
        ("train.cohort=0", "train: cohort is 0, it must be"),
        ("train.evaluate_every=0", "train: evaluate_every is 0, it must be"),
        ("train.checkpoint_every=-1", "train: checkpoint_every is -1, it must be"),
        ("train.evaluate_train=1", "train: evaluate_train is 1, expected true or false"),
        ("train.device=gpu", "train: device is 'gpu', on this machine there is: auto, cpu"),
        ("train.device=cuda:99", "train: device is 'cuda:99'"),
        ("train=3", "train is 3, expected a table [train]"),
        ("target=85", "target is 85, it must be above 0 and at most 1"),
        ("target=high", "target is 'high', expected a number"),
        ("name=...", "name is '...', it must have a letter or a digit"),
        ("data.name=digit", "data: unknown data set 'digit' (did you mean 'digits'?)"),
        ("data.folder=x", "data: unknown key 'folder'"),
        ("partition.kind=dirichelt", "partition: kind is 'dirichelt' (did you mean 'dirichlet'?)"),
        ("train.sampling=posson", "train: sampling is 'posson' (did you mean 'poisson'?)"),
        ("partition.kind=by_group", "partition: by_group makes one client per owner, and these data do not say"),
        ("partition.labels=2", "partition: unknown key 'labels'"),
        ("partition.clients=0", "partition: clients is 0, must be a whole number of at least 1"),
        ("partition.clients=5000", "partition: 5000 clients but only 1437 examples"),
        ("model.name=logistc", "model: name is 'logistc' (did you mean 'logistic'?)"),
        (
            "model.name=mpl",
            "model: name is 'mpl' (did you mean 'mlp'?), it must be one of ['fmnist_cnn', 'kws_cnn', 'logistic', 'mlp'",
        ),
        (
            "partition.kind=group",
            "partition: kind is 'group' (did you mean 'by_group'?), it must be one of ['by_group'",
        ),
        ("algorithm.1.batch_size=0", 'it must be a whole number of at least 1, or None ("none" in a file) for all'),
        ("model.outputs=3", "model: outputs follows from the rest of the experiment: leave it out"),
        ("model.hidden=[0]", "model: hidden[0] is 0, must be at least 1"),
        ("model.hidden=32", "model: hidden is 32, expected a list of whole numbers"),
        ("model.name=fmnist_cnn", "model: fmnist_cnn does not take examples of shape [1, 8, 8]"),
        ("algorithm.name=fedavgg", "algorithm 1 (fedavgg): name is 'fedavgg' (did you mean 'fedavg'?)"),
        ("algorithm.1.lr=0", "algorithm 1 (fedavg): lr is 0, it must be greater than 0"),
        ("algorithm.2.lr=fast", "algorithm 2 (fedavg): lr is 'fast', expected a number"),
        ("algorithm.1.lrr=1", "algorithm 1 (fedavg): unknown key 'lrr' (did you mean 'lr'?)"),
        (
            "algorithm.1.loss=mes",
            "algorithm 1 (fedavg): loss is 'mes' (did you mean 'mse'?), expected one of 'cross_entropy', 'mse', 'mae'",
        ),
        ("algorithm.1.model=mlp", "algorithm 1 (fedavg): model follows from the rest of the experiment"),
        ("algorithm.1.inner.name=fedavg", "algorithm 1 (fedavg): it wraps no other algorithm: leave out inner"),
        ("algorithm.1.optimiser=sgdd", "optimiser is 'sgdd' (did you mean 'sgd'?), expected one of 'sgd', 'adam'"),
        ("algorithm.1.label=3", "algorithm 1 (fedavg): label is 3, expected a string"),
        ("algorithm.1.label=!", "algorithm 1 (fedavg): label is '!', expected a string"),
        (r'algorithm.1.label="\u001b]0;x"', r"algorithm 1: label is '\x1b]0;x', leave out what is no letter"),
        (r'algorithm.1.label="a\u202eb"', r"algorithm 1: label is 'a\u202eb', leave out what is no letter"),
        (r'name="a\u001b[2J"', r"name is 'a\x1b[2J', leave out what is no letter"),
        ("algorithm=fedavg", "algorithm is 'fedavg', expected a table [[algorithm]]"),
        ("algorithm=[]", "algorithm is missing: add a table [[algorithm]]"),
    ],
)
def test_every_mistake_is_named(setting: str, words: str) -> None:
    assert words in message(setting)


WRAPPED = """
[[algorithm]]
name = "averaged"
window = 2
{outer}
[algorithm.inner]
name = "fedova"
{middle}
[algorithm.inner.inner]
name = "fedavg"
"""


def test_a_name_that_is_none_and_a_wrapper_that_is_none_are_refused_as_ever() -> None:
    text = SMALL[: SMALL.index("[[algorithm]]")] + WRAPPED.format(outer="", middle="")
    with pytest.raises(ExperimentError, match=r"inner \(fedova\), inner .*name is \['fedavg'\]"):
        parse(tomllib.loads(text.replace('name = "fedavg"', 'name = ["fedavg"]')))
    alone = text[: text.index("[algorithm.inner]")].replace("window = 2", "lr = 0.1")
    with pytest.raises(ExperimentError, match=r"it wraps another algorithm: add a table \[algorithm.inner\]"):
        parse(tomllib.loads(alone))
    with pytest.raises(ExperimentError, match=r"algorithm 1 \(fedavg\): unknown key 'mu'"):
        parse(tomllib.loads(text.replace('"averaged"\nwindow = 2', '"fedavg"\nmu = 0.1').replace("fedova", "feddane")))


@pytest.mark.parametrize(
    ("outer", "middle", "words"),
    [
        ("clip = 3.0", "", "(averaged): clip is a field of fedavg: write it in [algorithm.inner.inner]"),
        ("weighted = true", "", "(averaged): weighted is a field of fedova: write it in [algorithm.inner]"),
        ("", "lr = 0.1", "inner (fedova): lr is a field of fedavg: write it in [algorithm.inner.inner]"),
        ("windw = 2", "", "(averaged): unknown key 'windw' (did you mean 'window'?)"),
        ('model = "mlp"', "", "(averaged): model follows from the rest of the experiment: leave it out"),
        ('loss = "mse"', "", "(averaged): loss is a field of fedavg: write it in [algorithm.inner.inner]"),
    ],
)
def test_a_field_of_a_wrapped_algorithm_is_sent_to_its_place(outer: str, middle: str, words: str) -> None:
    text = SMALL[: SMALL.index("[[algorithm]]")] + WRAPPED.format(outer=outer, middle=middle)
    with pytest.raises(ExperimentError) as caught:
        parse(tomllib.loads(text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ('name = "digits"\n', "data: name is missing, expected a string"),
        ('kind = "iid"\n', "partition: kind is missing, expected one of by_group, dirichlet, iid, labels_per_client"),
        ("rounds = 4\n", "train: rounds is missing, expected a whole number"),
        ('name = "mlp"\n', "model: name is missing, expected one of"),
        ('name = "fedavg"\n', "algorithm 1: name is missing, expected one of fedavg"),
    ],
)
def test_what_is_missing_is_named(left_out: str, words: str) -> None:
    assert words in message(text=SMALL.replace(left_out, ""))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\nrounds = 3\n")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    for path, words in [
        (broken, "broken.toml is not TOML: "),
        (broken, "line 1"),
        (tmp_path / "latin.toml", "latin.toml is not TOML"),
        (tmp_path / "none.toml", "there is no file"),
        (tmp_path, "is a folder, expected an experiment file"),
    ]:
        with pytest.raises(ExperimentError, match="(?s)" + words):
            read(path)


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    path.write_text(SMALL, "utf-8-sig")
    assert load(path).name == "small"


# Overrides


def test_a_setting_is_a_toml_value_or_a_string() -> None:
    found = tables("model.hidden=[8, 8]", "name=my run", 'algorithm.1.label="1"', "algorithm.lr = 1e-3")
    assert found["model"]["hidden"] == [8, 8]
    assert found["name"] == "my run"
    assert found["algorithm"][0]["label"] == "1"
    assert [one["lr"] for one in found["algorithm"]] == [1e-3, 1e-3]


def test_algorithms_are_addressed_by_position_label_and_name() -> None:
    assert "lr" not in tables("algorithm.2.lr=0.3")["algorithm"][0]
    assert tables("algorithm.with-momentum.lr=0.3")["algorithm"][1]["lr"] == 0.3
    assert tables("algorithm.With momentum.lr=0.3")["algorithm"][1]["lr"] == 0.3
    assert [one.get("lr") for one in tables("algorithm.fedavg.lr=0.3")["algorithm"]] == [0.3, None], "label first"
    named = tables("algorithm.label=x", "algorithm.fedavg.lr=0.3")
    assert [one["lr"] for one in named["algorithm"]] == [0.3, 0.3]


def test_the_original_is_left_alone() -> None:
    original = tomllib.loads(SMALL)
    override(original, ["algorithm.lr=3", "train.rounds=9"])
    assert original == tomllib.loads(SMALL)


def test_another_kind_drops_the_fields_of_the_old_one() -> None:
    found = override(read(), ["partition.seed=3", "partition.kind=iid", "model.name=logistic"])
    assert found["partition"] == {"kind": "iid", "clients": 100, "seed": 3}
    assert found["model"] == {"name": "logistic"}
    parse(found)
    with pytest.raises(ExperimentError, match="unknown key 'labels'"):
        parse(override(read(), ["partition.labels=3", "partition.kind=iid"]))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.rounds", "--set train.rounds: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("train..rounds=3", "expected key=value"),
        ("train.rounds.more=3", "--set train.rounds.more: rounds is 4, expected a table"),
        ("algorithm.lrr=3", "--set algorithm: unknown key 'lrr' (did you mean 'lr'?)"),
        ("algorithm.fedavgg.lr=3", "--set algorithm: unknown key 'fedavgg' (did you mean 'fedavg'?)"),
        ("rounds=3", "--set rounds: unknown key 'rounds' (did you mean train.rounds?)"),
        ("lr=3", "--set lr: unknown key 'lr' (did you mean algorithm.lr?)"),
        ("seed=3", "--set seed: unknown key 'seed' (did you mean partition.seed or model.seed or train.seed?)"),
        ("fedavg.lr=3", "--set fedavg.lr: unknown key 'fedavg' (did you mean algorithm.lr?)"),
        ("zzz=3", "unknown key 'zzz', known are data, partition"),
        ("algorithm.3.lr=3", "--set algorithm.3: there are 2 algorithms, counted from 1"),
    ],
)
def test_settings_that_lead_nowhere(setting: str, words: str) -> None:
    assert words in message(setting)


# Wrappers


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ALGORITHMS, "outer", Outer)  # type: ignore[arg-type]
    nested = '\n[[algorithm]]\nname = "outer"\nbeta = 0.1\n[algorithm.inner]\nname = "outer"\n'
    return SMALL + nested + '[algorithm.inner.inner]\nname = "fedavg"\nlr = 0.3\n'


def test_wrappers_nest_to_any_depth(outer: str) -> None:
    made: Any = build(parse(tables(text=outer))).algorithms["outer"]
    assert (made.beta, made.inner.beta) == (0.1, 0.5)
    assert made.classes == made.inner.classes == 10, "from the data"
    assert made.inner.inner.lr == 0.3
    assert made.inner.inner.model[-1].out_features == 2, "what the wrapper asks for"
    assert build(parse(tables(text=outer))).algorithms["fedavg"].model[-1].out_features == 10  # type: ignore[index]


def test_wrappers_read_back(outer: str) -> None:
    experiment = parse(tables("algorithm.3.inner.classes=4", text=outer))
    assert parse(tomllib.loads(toml.dump(experiment.table()))) == experiment
    made: Any = build(experiment).algorithms["outer"]
    assert (made.classes, made.inner.classes) == (10, 4)


def test_settings_reach_into_wrappers(outer: str) -> None:
    everywhere = tables("algorithm.lr=0.7", text=outer)["algorithm"]
    assert [one.get("lr") for one in everywhere] == [0.7, 0.7, None]
    assert everywhere[2]["inner"]["inner"]["lr"] == 0.7
    one = tables("algorithm.outer.inner.beta=0.2", text=outer)["algorithm"][2]
    assert (one["beta"], one["inner"]["beta"]) == (0.1, 0.2)
    assert tables("algorithm.inner.beta=0.3", text=outer)["algorithm"][2]["inner"]["beta"] == 0.3


def test_a_wrapper_may_be_chosen_by_settings_in_any_order(outer: str) -> None:
    found = tables("algorithm.inner.lr=0.5", "algorithm.inner.name=fedavg", "algorithm.name=outer")
    assert found["algorithm"][0] == {"name": "outer", "inner": {"name": "fedavg", "lr": 0.5}}


def test_mistakes_in_wrappers_are_named(outer: str) -> None:
    assert "algorithm 3 (outer): beta is 2, it must be at least 0" in message("algorithm.3.beta=2", text=outer)
    deep = message("algorithm.3.inner.inner.lr=-1", text=outer)
    assert deep.startswith("algorithm 3 (outer), inner (outer), inner (fedavg): lr is -1, it must be")
    assert "inner (outer): unknown key 'bta'" in message("algorithm.3.inner.bta=1", text=outer)
    without = outer.split("[algorithm.inner.inner]")[0]
    assert "it wraps another algorithm: add a table [algorithm.inner.inner]" in message(text=without)


# Devices


def test_auto_takes_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.find("auto") == "cuda"
    assert devices.find("cuda:1") == "cuda:1"
    with pytest.raises(ExperimentError, match="there is: auto, cpu, cuda, cuda:0, cuda:1"):
        devices.find("cuda:2")


# Running


def history(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


class StopAfter(Watch):
    """Asks to stop once so many rounds were seen, over all runs."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds
        self.begun: list[str] = []

    def begin(self, label: str, progress: Progress) -> None:
        self.begun.append(label)

    def round(self, label: str, progress: Progress, record: dict[str, Any]) -> None:
        self.left -= 1

    def wanted(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_stopped_comparison_goes_on_as_if_it_had_not_been(tmp_path: Path, rounds: int) -> None:
    experiment = small()
    whole = compare(experiment, tmp_path / "whole")
    watch = StopAfter(rounds)
    part = compare(experiment, tmp_path / "part", watch=watch, stop=watch.wanted)
    assert part[-1].run.stopped
    assert len(part) == (1 if rounds < 4 else 2)
    again = compare(load(tmp_path / "part" / "experiment.toml"), tmp_path / "part", resume=True)
    assert [one.label for one in again] == ["fedavg", "With momentum"]
    for one, other in zip(whole, again, strict=True):
        assert history(one.folder) == history(other.folder)
        assert all(torch.equal(one.run.params[name], other.run.params[name]) for name in one.run.params)


def test_a_stop_between_two_runs_does_not_begin_the_next(tmp_path: Path) -> None:
    watch = StopAfter(4)
    outcomes = compare(small(), tmp_path / "x", watch=watch, stop=watch.wanted)
    assert [one.label for one in outcomes] == ["fedavg"]
    assert watch.begun == ["fedavg"]


def test_finished_runs_are_not_repeated_and_rounds_may_be_added(tmp_path: Path) -> None:
    compare(small("train.rounds=2"), tmp_path)
    watch = StopAfter(99)
    compare(small("train.rounds=2"), tmp_path, resume=True, watch=watch)
    assert watch.left == 99
    longer = compare(small("train.rounds=3"), tmp_path, resume=True, watch=watch)
    assert [one.run.rounds for one in longer] == [3, 3]
    assert watch.left == 97
    assert load(tmp_path / "experiment.toml").train["rounds"] == 3


@pytest.mark.parametrize("settings", [("train.rounds=2",), ("algorithm.1.label=another", "algorithm.2.label=more")])
def test_a_folder_with_runs_is_left_as_it_is_by_another_comparison(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Its experiment was replaced before the runs were found there: nothing could go on from the folder alone."""
    compare(small("train.rounds=1"), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match="already holds a run: resume it, or choose another folder"):
        compare(small(*settings), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_may_ask_for_clients_drawn_one_by_one(tmp_path: Path) -> None:
    run = compare(small("train.sampling=poisson"), tmp_path / "poisson")[0].run
    draw = cohorts(10, 3, "poisson")
    drawn = [sorted(draw(At(0, number, 0)).tolist()) for number in (1, 2, 3, 4)]
    assert [record["cohort"] for record in run.history] == drawn
    assert {len(cohort) for cohort in drawn} != {3}
    with pytest.raises(ValueError, match=r"train\.sampling"):
        compare(small("train.rounds=5", "train.sampling=fixed"), tmp_path / "poisson", resume=True)


def test_a_run_from_before_there_was_sampling_goes_on(tmp_path: Path) -> None:
    compare(small("train.rounds=1"), tmp_path)
    for path in tmp_path.rglob("*.toml"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if not line.startswith("sampling")) + "\n")
    assert compare(small("train.rounds=2"), tmp_path, resume=True)[0].run.rounds == 2


def test_another_experiment_does_not_go_on_in_this_folder(tmp_path: Path) -> None:
    compare(small("train.rounds=1"), tmp_path)
    stored = (tmp_path / "experiment.toml").read_bytes()
    with pytest.raises(ValueError, match=r"algorithm\.lr"):
        compare(small("train.rounds=1", "algorithm.lr=0.7"), tmp_path, resume=True)
    assert (tmp_path / "experiment.toml").read_bytes() == stored


def test_an_experiment_that_cannot_go_on_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    """Whichever run it is that cannot: the first goes on here, the second is of another experiment."""
    compare(small("train.rounds=1"), tmp_path)
    stored = (tmp_path / "experiment.toml").read_bytes()
    with pytest.raises(RunFolderError, match=r"algorithm\.lr"):
        compare(small("train.rounds=2", "algorithm.2.lr=0.7"), tmp_path, resume=True)
    assert (tmp_path / "experiment.toml").read_bytes() == stored


def test_fewer_rounds_than_a_run_has_are_refused(tmp_path: Path) -> None:
    compare(small("train.rounds=3"), tmp_path)
    stored = (tmp_path / "experiment.toml").read_bytes()
    with pytest.raises(RunFolderError, match="3"):
        compare(small("train.rounds=2"), tmp_path, resume=True)
    assert (tmp_path / "experiment.toml").read_bytes() == stored


def test_an_algorithm_that_diverges_is_an_outcome(tmp_path: Path) -> None:
    experiment = small("algorithm.1.lr=1e30", "train.rounds=2")
    for resume in (False, True):
        first, second = compare(experiment, tmp_path, resume=resume)
        assert "diverged" in str(first.failed)
        assert "resume" in str(first.failed), "the way back"
        assert first.run is not None
        assert first.run.rounds == 2
        assert "not finite" in first.run.history[-1]["skipped"]
        assert second.failed is None
        assert second.run is not None
        assert second.run.rounds == 2


def test_each_run_has_its_own_configuration(tmp_path: Path) -> None:
    outcomes = compare(small("train.rounds=1"), tmp_path)
    assert [one.folder.name for one in outcomes] == ["fedavg", "with-momentum"]
    assert load(outcomes[1].folder / "config.toml").labels == ["With momentum"]
    summary = json.loads((outcomes[1].folder / "summary.json").read_text())
    assert (summary["name"], summary["algorithm"]) == ("small", "With momentum")
    assert run_folders(tmp_path) == [one.folder for one in outcomes]


def test_algorithms_are_the_ones_python_would_make() -> None:
    setup = build(small())
    made = setup.algorithms["With momentum"]
    assert isinstance(made, FedAvg)
    assert (made.momentum, made.epochs) == (0.5, 1)
    model = fedge.models.mlp(64, (4,), 10, seed=0)
    for one, other in zip(model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(one, other)


# Plans and folders


OPTIMISERS = """
[[algorithm]]
name = "fedavg"
optimiser = {name = "spectral", momentum = 0.9, vector_lr = "none"}
server_optimiser = {name = "adam", betas = [0.8, 0.9]}
carry_momentum = true

[[algorithm]]
name = "fedova"
[algorithm.inner]
name = "fedavg"
optimiser = "spectral"
momentum = 0.98
inner_decay = 0.2
server_optimiser = "spectral"
server_momentum = 0.5

[[algorithm]]
name = "fedcm"
alpha = 0.3
"""


def test_optimisers_are_names_or_tables() -> None:
    head = SMALL[: SMALL.index("[[algorithm]]")]
    experiment = parse(tomllib.loads(head + OPTIMISERS))
    again = parse(tomllib.loads(toml.dump(experiment.table())))
    assert again == experiment
    fedavg, fedova, fedcm = build(again).algorithms.values()
    assert fedavg.optimiser == fedge.Spectral(0.9, vector_lr=None)
    assert fedavg.server_optimiser == fedge.Adam((0.8, 0.9))
    assert (fedova.inner.optimiser, fedova.inner.momentum, fedova.inner.inner_decay) == ("spectral", 0.98, 0.2)
    assert fedcm.alpha == 0.3
    mistakes = {
        '"spectrl"': r"optimiser is 'spectrl' \(did you mean 'spectral'\?\), expected one of 'sgd', 'adam', 'spectral'",
        '{name = "spectral", momentun = 0.9}': r"optimiser: unknown key 'momentun' \(did you mean 'momentum'\?\)",
        '{name = "spectral", momentum = "9"}': "optimiser: momentum is '9', expected a number",
        '{name = "sgd", eps = 1}': "optimiser: unknown key 'eps', known are momentum, weight_decay",
        "{momentum = 0.9}": "optimiser.name is None, known are sgd, adam, spectral",
        '{name = "spectrl"}': r"optimiser.name is 'spectrl' \(did you mean 'spectral'\?\), known are",
    }
    for wrong, message in mistakes.items():
        with pytest.raises(ExperimentError, match=message):
            parse(tomllib.loads(head + f'[[algorithm]]\nname = "fedavg"\noptimiser = {wrong}'))


MEMORY = """
[[algorithm]]
name = "scaffold"

[[algorithm]]
name = "scaffold"
clients = 20

[[algorithm]]
name = "scaffold"
weighted = true

[[algorithm]]
name = "data_sharing"
inner = { name = "scaffold", lr = 0.05 }

[[algorithm]]
name = "fedova"
inner = { name = "scaffold" }

[[algorithm]]
name = "fedper"
personal = ["fc1"]
epochs = 1

[[algorithm]]
name = "fedprox"
mu = 0.5

[[algorithm]]
name = "fednova"
momentum = 0.9
"""


def test_scaffold_takes_the_number_of_clients_from_the_partition() -> None:
    experiment = parse(tomllib.loads(SMALL[: SMALL.index("[[algorithm]]")] + MEMORY))
    again = parse(tomllib.loads(toml.dump(experiment.table())))
    assert again == experiment
    plain, given, weighted, sharing, fedova, fedper, fedprox, fednova = build(again).algorithms.values()
    assert (plain.clients, given.clients, weighted.clients) == (10, 20, None)
    assert (sharing.inner.clients, fedova.inner.clients) == (10, None)
    assert (fedper.personal, fedprox.mu, fednova.momentum) == (("fc1",), 0.5, 0.9)


def test_personal_layers_in_the_files_of_a_run(tmp_path: Path) -> None:
    head = SMALL[: SMALL.index("[[algorithm]]")]
    experiment = parse(tomllib.loads(head + '[[algorithm]]\nname = "fedper"\npersonal = ["fc2"]\nepochs = 1'))
    compare(experiment, tmp_path / "run")
    (record, *_) = map(json.loads, (tmp_path / "run" / "fedper" / "rounds.jsonl").read_text().splitlines())
    assert 0 <= record["client_accuracy_worst_decile"] <= record["client_accuracy_mean"] <= 1


def test_the_next_free_folder(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    assert plan(file, root=tmp_path).folder == tmp_path / "small"
    (tmp_path / "small").mkdir()
    assert plan(file, root=tmp_path).folder == tmp_path / "small", "an empty folder is free"
    compare(small("train.rounds=1"), tmp_path / "small")
    assert plan(file, root=tmp_path).folder == tmp_path / "small-2"
    with pytest.raises(ExperimentError, match="already holds a run: add --resume"):
        plan(file, out=tmp_path / "small")
    with pytest.raises(ExperimentError, match="already holds a run"):
        plan(file, out=tmp_path / "small" / "fedavg")


def test_resume_finds_the_newest_that_is_not_finished(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    with pytest.raises(ExperimentError, match="nothing to resume: no experiment 'small'"):
        plan(file, resume=True, root=tmp_path)
    watch = StopAfter(1)
    compare(small(), tmp_path / "small", watch=watch, stop=watch.wanted)
    compare(small("train.rounds=1"), tmp_path / "small-2")
    (tmp_path / "small-3").mkdir()
    (tmp_path / "small-3" / "experiment.toml").write_text("not [ TOML")
    found = plan(file, resume=True, root=tmp_path)
    assert (found.folder, found.resume) == (tmp_path / "small", True)
    compare(small(), tmp_path / "small", resume=True)
    with pytest.raises(ExperimentError, match="is finished; give it more rounds"):
        plan(file, resume=True, root=tmp_path)


def test_resume_needs_something_to_go_on_from(tmp_path: Path) -> None:
    compare(small("train.rounds=1"), tmp_path / "runs")
    assert plan(out=tmp_path / "runs", resume=True).experiment == small("train.rounds=1")
    with pytest.raises(ExperimentError, match=r"is one run of the experiment in .*: use --out .*runs"):
        plan(out=tmp_path / "runs" / "fedavg", resume=True)
    with pytest.raises(ExperimentError, match=r"holds no experiment\.toml"):
        plan(out=tmp_path / "nowhere", resume=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*file"):
        compare(small(), tmp_path / "file" / "runs")


def test_only_the_federation_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "half.toml"
    path.write_text('[data]\nname = "digits"\n[partition]\nkind = "iid"\n')
    assert load_federation(path, ["partition.clients=7"]).clients == 7


def test_slugs() -> None:
    assert slug("FedAvg (lr = 0.1)") == "fedavg-lr-0.1"
    assert slug("../up") == "up"
    assert slug(" β ") == "β"


# Progress


def test_the_meter_counts_earlier_rounds_but_not_their_time() -> None:
    def record(round: int, **more: float) -> dict[str, Any]:
        return {"round": round, "up_bytes": 1_000_000, "down_bytes": 2_000_000, **more}

    clock = iter([0.0, 3.0, 5.0])
    meter = Meter(5, [record(1, test_accuracy=0.5), record(2), record(3)], lambda: next(clock))
    assert meter.progress == Progress(0, 5)
    assert meter(record(2)) == Progress(2, 5, 0.5, 6.0, 3.0), "the checkpoint was of round 1"
    seen = meter(record(3, test_accuracy=0.7))
    assert (seen.accuracy, seen.megabytes, seen.pace, seen.left) == (0.7, 9.0, 2.5, 5.0)
