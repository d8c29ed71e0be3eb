"""A model to take home: as a module, as files that other programs read, and from a run folder."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedge
from fedge.cli.app import app
from fedge.core import filled
from fedge.experiment import compare, loading, parse
from fedge.runs import checkpoint, export
from fedge.runs.folder import RunFolderError

DIGITS = fedge.data.load("digits")
X = DIGITS.test_x[:50]


def digits() -> fedge.Federation:
    return fedge.Federation(DIGITS, fedge.partition.labels_per_client(DIGITS.train_y, 20, labels=2, seed=0))


def trained(algorithm: fedge.Algorithm, **more: object) -> fedge.Run:
    return fedge.train(algorithm, digits(), rounds=2, cohort=5, **more)  # type: ignore[arg-type]


def fedavg(outputs: int = 10) -> fedge.FedAvg:
    return fedge.FedAvg(fedge.models.mlp(outputs=outputs, seed=0), epochs=1)


ALGORITHMS = {
    "fedavg": fedavg,
    "averaged": lambda: fedge.Averaged(fedavg(), window=2),
    "fedova": lambda: fedge.FedOVA(fedavg(2)),
    "averaged around fedova": lambda: fedge.Averaged(fedge.FedOVA(fedavg(2)), window=2),
    "fedova around averaged": lambda: fedge.FedOVA(fedge.Averaged(fedavg(2), window=2)),
    "robust": lambda: fedge.Robust(fedavg(), fedge.Median()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_module_gives_the_scores_of_the_run(name: str) -> None:
    run = trained(ALGORITHMS[name]())
    module = run.module()
    assert not module.training
    torch.testing.assert_close(module(X), run.scores(X), rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # a copy: what is done to it does not reach the run
        next(module.parameters()).zero_()
    assert all(leaf.abs().sum() > 0 for leaf in run.params.values())


def test_the_names_are_those_of_the_users_module() -> None:
    run = trained(fedavg())
    assert list(run.module().state_dict()) == list(run.algorithm.model.state_dict())
    whole = trained(fedge.FedOVA(fedavg(2))).module().state_dict()
    assert len(whole) == 10 * len(run.params)
    assert {name.split(".", 2)[2] for name in whole} == set(run.params)


class Tied(nn.Module):
    """Two layers with one weight, and a third that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.two.weight = self.one.weight
        self.one.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x.flatten(1))))))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_tied_and_frozen_tensors_survive(suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = trained(fedge.FedAvg(Tied(), epochs=1))
    module = run.module()
    assert module.one.weight is module.two.weight
    torch.testing.assert_close(module.one.bias, run.algorithm.model.one.bias)  # type: ignore[union-attr]
    fresh = Tied()
    fresh.load_state_dict(read(run.save(tmp_path / f"model{suffix}")))
    torch.testing.assert_close(fresh(X), run.scores(X), rtol=1e-5, atol=1e-5)


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


PLAIN = """
import sys, numpy as np
path, x = sys.argv[1], np.load(sys.argv[2])
if path.endswith(".onnx"):
    import onnxruntime
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    scores = session.run(None, {"x": x})[0]
else:
    import torch
    scores = torch.export.load(path).module()(torch.from_numpy(x)).detach().numpy()
assert "fedge" not in sys.modules
np.save(sys.argv[3], scores)
"""


@pytest.mark.parametrize("name", ["fedavg", "fedova"])
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_program_without_fedge_gets_the_same_scores(name: str, suffix: str, tmp_path: Path) -> None:
    run = trained(ALGORITHMS[name]())
    path = run.save(tmp_path / "deep" / f"model{suffix}")
    np.save(tmp_path / "x.npy", X.numpy())
    words = [str(path), str(tmp_path / "x.npy"), str(tmp_path / "scores.npy")]
    subprocess.run([sys.executable, "-c", PLAIN, *words], check=True, cwd=tmp_path)
    got = torch.from_numpy(np.load(tmp_path / "scores.npy"))
    torch.testing.assert_close(got, run.scores(X), rtol=1e-4, atol=1e-4)


def words() -> fedge.data.Data:
    names = np.array(["Äpfel", "pears"])
    y = (DIGITS.train_y % 2).numpy(), (DIGITS.test_y % 2).numpy()
    return fedge.data.from_arrays(DIGITS.train_x, names[y[0]], DIGITS.test_x, names[y[1]])


def metadata(path: Path) -> dict[str, str]:
    """What a file says beside its tensors, read as other programs do."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    if path.suffix == ".onnx":
        import onnx

        return {one.key: one.value for one in onnx.load(path).metadata_props}
    found = {"classes": ""}
    torch.export.load(path, extra_files=found)
    return found


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".safetensors"])
def test_the_file_names_the_classes(suffix: str, tmp_path: Path) -> None:
    data = words()
    federation = fedge.Federation(data, fedge.partition.iid(data.train_y, clients=4))
    run = fedge.train(fedavg(2), federation, rounds=1, out=tmp_path / "run")
    again = fedge.load_run(tmp_path / "run", fedavg(2))
    assert run.classes == again.classes == tuple(sorted(["pears", "Äpfel"]))
    for one in (run, again):
        assert json.loads(metadata(one.save(tmp_path / f"model{suffix}"))["classes"]) == list(run.classes)


def test_numbers_that_are_labels_are_names_and_a_regression_has_none(tmp_path: Path) -> None:
    y = DIGITS.train_y[:60] % 3 + 5
    data = fedge.data.from_arrays(DIGITS.train_x[:60], y, DIGITS.train_x[:60], y)
    run = fedge.train(fedavg(3), fedge.Federation(data, [range(60)]), rounds=1)
    assert run.classes == ("5", "6", "7")
    numbers = fedge.data.from_arrays(DIGITS.train_x[:60], y / 7, DIGITS.train_x[:60], y / 7)
    other = fedge.train(
        fedge.FedAvg(fedge.models.mlp(outputs=1), loss=fedge.losses.mse),
        fedge.Federation(numbers, [range(60)]),
        rounds=1,
    )
    assert other.classes == ()
    assert "classes" not in metadata(other.save(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((3, 63)), r"x has examples of shape \[63\] .*, the model was trained on .*\[1, 8, 8\] .*: bring x"),
        (np.zeros((0, 64)), "x has 0 examples, at least 1 is needed"),
        (3.0, r"x is a single number, expected \[N, ...\]"),
        (np.array([["a"]], dtype=object), "x cannot be read as an array of numbers"),
        ({"image": np.zeros((1, 64))}, "x cannot be read as an array of numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_said_in_one_line(x: object, message: str) -> None:
    run = trained(fedavg())
    with pytest.raises(ValueError, match=message) as error:
        run.predict(x)
    assert "\n" not in str(error.value)


def test_an_axis_too_many_is_no_silent_nonsense() -> None:
    flat = fedge.data.Data(
        DIGITS.train_x.flatten(1), DIGITS.train_y, DIGITS.test_x.flatten(1), DIGITS.test_y, DIGITS.classes
    )
    run = fedge.train(fedge.FedAvg(nn.Linear(64, 10)), fedge.Federation(flat, [range(100)]), rounds=1)
    with pytest.raises(ValueError, match=r"x has examples of shape \[1, 64\]"):
        run.predict(flat.test_x[:, None])
    with pytest.raises(
        ValueError, match=r"x is a single example of shape \[64\] .*, expected \[N, ...\]: give x\[None\]"
    ):
        run.predict(flat.test_x[0])


def test_shapes_that_the_model_takes_are_taken() -> None:
    run = trained(fedavg())
    assert torch.equal(run.predict(X.reshape(-1, 64)), run.predict(X.numpy().astype("float64")))  # type: ignore[arg-type]


def test_several_inputs_are_compared_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(64, 10)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([left, right], 1))

    def cut(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": x.flatten(1)[:, :32], "right": x.flatten(1)[:, 32:]}

    data = fedge.data.Data(cut(DIGITS.train_x), DIGITS.train_y, cut(DIGITS.test_x), DIGITS.test_y, 10)
    run = fedge.train(fedge.FedAvg(Two(), epochs=1), fedge.Federation(data, [range(100), range(100, 200)]), rounds=1)
    expected = run.predict(cut(X))
    assert torch.equal(run.predict(dict(reversed(cut(X).items()))), expected)  # type: ignore[arg-type]
    for x, message in (
        (X, r"x is a Tensor, .* give a dict with \['left', 'right'\]"),
        ({"left": X}, r"x has \['left'\], the model was trained on \['left', 'right'\]"),
        ({"left": X, "right": X}, r"x has examples of 'left' of shape \[1, 8, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            run.predict(x)


def test_a_convolution_for_any_number_of_examples(tmp_path: Path) -> None:
    model, x = fedge.models.fmnist_cnn(seed=0).eval(), torch.randn(3, 1, 28, 28)
    path = export.save(model, tmp_path / "cnn.pt2", x[:1])
    program = torch.export.load(path).module()
    for count in (1, 3):
        torch.testing.assert_close(program(x[:count]), model(x[:count]), rtol=1e-5, atol=1e-5)


def test_personal_layers(tmp_path: Path) -> None:
    run = trained(fedge.FedPer(fedge.models.mlp(seed=0), epochs=1), out=tmp_path / "run")
    taken = run.history[-1]["cohort"][0]
    shared, own = run.module(), run.module(client=taken)
    last = list(shared.state_dict())[-1]
    assert torch.equal(next(iter(shared.parameters())), next(iter(own.parameters())))
    assert not torch.equal(shared.state_dict()[last], own.state_dict()[last])
    again = fedge.load_run(tmp_path / "run", fedge.FedPer(fedge.models.mlp(seed=1), epochs=1))
    assert torch.equal(again.module(client=taken).state_dict()[last], own.state_dict()[last])
    never = next(one for one in range(20) if all(one not in record["cohort"] for record in run.history))
    with pytest.raises(ValueError, match=f"client {never} never took part"):
        run.module(client=never)


def test_one_model_for_all_has_no_personal_one() -> None:
    with pytest.raises(ValueError, match="FedAvg has one model for all clients"):
        trained(fedavg()).module(client=0)


class Doubled(fedge.FedAvg):
    """Scores of its own, and no network."""

    def scores(self, model, state, x):  # type: ignore[no-untyped-def]
        return 2 * super().scores(model, state, x)


class Halved(fedge.Robust):
    """A wrapper with scores of its own."""

    def scores(self, model, state, x):  # type: ignore[no-untyped-def]
        return super().scores(model, state, x) / 2


@pytest.mark.parametrize("kind", ["Doubled", "Halved"])
def test_own_scores_need_an_own_network(kind: str) -> None:
    run = trained(
        Doubled(fedge.models.mlp(seed=0), epochs=1) if kind == "Doubled" else Halved(fedavg(), fedge.Median())
    )
    with pytest.raises(NotImplementedError, match=rf"write {kind}\.network"):
        run.module()


# From a folder


def test_a_run_from_its_folder_is_the_run(tmp_path: Path) -> None:
    run = trained(fedavg(), out=tmp_path / "run")
    again = fedge.load_run(tmp_path / "run", fedge.FedAvg(fedge.models.mlp(seed=5), epochs=1))
    assert torch.equal(again.scores(X), run.scores(X))
    assert [one["test_accuracy"] for one in again.history] == [one["test_accuracy"] for one in run.history]
    assert again.ledger.total() == run.ledger.total()
    assert again.summary() | {"seconds": 0} == run.summary() | {"seconds": 0}
    with pytest.raises(fedge.RunFolderError, match=r"algorithm\.epochs = 1, the algorithm given has 2"):
        fedge.load_run(tmp_path / "run", fedge.FedAvg(fedge.models.mlp(seed=0), epochs=2))
    with pytest.raises(fedge.RunFolderError, match="was started from Python: give its algorithm"):
        fedge.load_run(tmp_path / "run")
    with pytest.raises(fedge.RunFolderError, match=r"holds the runs \['run'\]"):
        fedge.load_run(tmp_path)
    with pytest.raises(fedge.RunFolderError, match="there is no run in"):
        fedge.load_run(tmp_path / "none")


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--set", "train.rounds=2", "--no-report", "--quiet", "--out", "e"]
    assert CliRunner().invoke(app, words).exit_code == 0
    return tmp_path / "e"


def test_an_experiments_run_needs_neither_its_data_nor_its_algorithm(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise AssertionError("the data were loaded")

    monkeypatch.setattr("fedge.experiment.loading.load_data", gone)
    for folder in ("fedavg", "fedova", "fedova-spectral"):
        run = fedge.load_run(experiment / folder)
        right = float((run.module()(DIGITS.test_x).argmax(1) == DIGITS.test_y).double().mean())
        assert right == run.history[-1]["test_accuracy"]


def test_a_folder_of_an_earlier_version_loads_with_its_data(experiment: Path) -> None:
    path = experiment / "fedova" / "clients.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({key: about[key] for key in ("clients", "classes", "names", "labels")}))
    run = fedge.load_run(experiment / "fedova")
    assert run.predict(X).shape == (50,)
    with pytest.raises(ValueError, match=r"set run\.example"):
        run.save(experiment / "model.onnx")
    run.example = X[:1]
    assert run.save(experiment / "model.onnx").stat().st_size > 1000


def test_the_command(experiment: Path) -> None:
    done = CliRunner().invoke(app, ["export", "e/fedova", "out/model.safetensors"])
    assert done.exit_code == 0
    assert "FedOVA, 2 rounds" in done.output
    assert len(read(experiment.parent / "out" / "model.safetensors")) == 40


def test_a_disk_without_room_is_named_with_the_file(experiment: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # ends a write as a full disk does
    try:
        done = CliRunner().invoke(app, ["export", "e/fedova", "full/model.pt"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (done.exit_code, done.stderr) == (
        2,
        "Error: cannot write full/model.pt: File too large; choose another place\n",
    )
    assert not list(Path("full").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["e/fedova", "model.onx"], "ends in '.onx' (did you mean '.onnx'?): choose one of"),
        (["e", "model.pt"], "it holds the runs"),
        (["none", "model.pt"], "there is no run in none"),
        (
            ["e/fedova", "e/fedova/checkpoint.pt"],
            "is a file of the run itself, which would be lost: choose another name",
        ),
        (["e/fedova", "e/fedova/best.pt"], "is a file of the run itself, which would be lost: choose another name"),
        (["e/fedova", "model.pt", "--client", "3"], "FedAvg has one model for all clients"),
    ],
)
def test_what_cannot_be_exported_gets_one_line(experiment: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["export", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_damaged_checkpoint_is_named(experiment: Path) -> None:
    path = experiment / "fedova" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(fedge.RunFolderError, match=r"cannot load the run: .*checkpoint\.pt"):
        fedge.load_run(experiment / "fedova")


def test_regression(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    data = fedge.data.Data(x, x.sum(1, keepdim=True), x[:5], x[:5].sum(1, keepdim=True), 0)
    federation = fedge.Federation(data, [list(range(k, 60, 3)) for k in range(3)])
    loss = lambda out, y: ((out - y) ** 2).mean(1)  # noqa: E731
    run = fedge.train(fedge.FedAvg(nn.Linear(4, 1), loss=loss, lr=0.01), federation, rounds=2, out=tmp_path / "r")
    again = fedge.load_run(tmp_path / "r", fedge.FedAvg(nn.Linear(4, 1), loss=loss, lr=0.01))
    assert torch.equal(again.scores(x), run.scores(x))


DAMAGES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("clients.json", lambda raw: raw[:-1], "clients.json is missing or damaged"),
    ("clients.json", lambda raw: b"{}", "clients.json is missing or damaged"),
    ("clients.json", lambda raw: raw.replace(b'"names": [', b'"names": ["a", '), "11 names for 10"),
    ("config.toml", lambda raw: b"\xff", "config.toml is missing or damaged"),
    ("config.toml", lambda raw: raw.replace(b'"logistic"', b'"mlp"'), "config.toml has model.name = 'mlp'"),
    ("ledger.jsonl", lambda raw: b"{}\n" + raw, "line 1 of ledger.jsonl is not what was written there"),
    ("rounds.jsonl", lambda raw: raw.replace(b'"round": 2', b'"round": 9'), "line 2 of rounds.jsonl is not what"),
    ("checkpoint.pt", lambda raw: raw[:-9], "checkpoint.pt"),
]


def logistic(folder: Path, **more: Any) -> Path:
    table = {
        "name": "t",
        "data": {"name": "digits"},
        "partition": {"kind": "iid", "clients": 5},
        "model": {"name": "logistic"},
        "train": {"rounds": 2, "cohort": 2, "keep": "best", **more},
        "algorithm": [{"name": "fedavg"}],
    }
    return compare(parse(table), folder)[0].folder


def test_a_damaged_folder_is_refused_in_one_line_that_names_the_file(tmp_path: Path) -> None:
    for number, (file, damage, told) in enumerate(DAMAGES):
        run = logistic(tmp_path / str(number))
        (run / file).write_bytes(damage((run / file).read_bytes()))
        found = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "m.pt")])
        assert (found.exit_code, told in found.stderr, found.stderr.count("\n")) == (2, True, 1), found.stderr


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt"])
def test_the_checkpoint_of_another_run_is_not_exported(file: str, tmp_path: Path) -> None:
    mine, other = logistic(tmp_path / "a"), logistic(tmp_path / "b", seed=3)
    (mine / file).write_bytes((other / file).read_bytes())
    with pytest.raises(RunFolderError, match=r"has train.seed = \d, but checkpoint.pt was written with \d"):
        fedge.load_run(mine, best=file == "best.pt")


WRONG_STATES = {
    "nothing": (lambda state: None, "TypeError"),
    "a number": (lambda state: 7, "TypeError"),
    "a tensor": (lambda state: torch.zeros(0), "IndexError"),
    "no parameters": (lambda state: {"params": None}, "has a NoneType where this one has a dict"),
    "a layer less": (lambda state: {"params": dict([*state["params"].items()][1:])}, "its state has no 'fc1.weight'"),
    "a layer more": (lambda state: {"params": state["params"] | {"x": torch.ones(1)}}, r"its state has \['x'\]"),
    "a shape": (lambda state: _with(state, lambda leaf: leaf[:3]), r"has shape \[3.*\], here it is \[10"),
    "a type": (lambda state: _with(state, lambda leaf: leaf > 0), "is torch.bool, here it is torch.float32"),
}


def _with(state: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {"params": {name: change(leaf) for name, leaf in state["params"].items()}}


@pytest.mark.parametrize("file", ["checkpoint.pt", "best.pt"])
@pytest.mark.parametrize("name", WRONG_STATES)
def test_parameters_that_are_not_the_models_are_not_exported(name: str, file: str, tmp_path: Path) -> None:
    run, (lie, told) = logistic(tmp_path), WRONG_STATES[name]
    content = checkpoint.load(run / file)
    checkpoint.save(run / file, content | {"state": lie(content["state"])})
    with pytest.raises(RunFolderError, match=rf"cannot load the run: .*{file} .*{told}"):
        fedge.load_run(run, best=file == "best.pt")


def test_a_personal_layer_of_another_shape_is_not_put_into_the_model() -> None:
    module = fedge.models.mlp(seed=0)
    with pytest.raises(ValueError, match=r"there is a 'fc2.bias' of shape \[3\], which the model does not have"):
        filled(module, {"fc2.bias": torch.zeros(3)})


SMALL_LIES = {
    "clients": (lambda about: about | {"clients": 30_000_000}, "clients is 30000000, by the configuration there are 5"),
    "example": (
        lambda about: about | {"example": {"shape": [10**4, 10**4], "type": "float32"}},
        "an example has 100000000 numbers, it may have 67108864",
    ),
    "parts": (
        lambda about: about | {"example": {"parts": [{"shape": [1 << 25], "type": "float32"}] * 3}},
        "an example has 100663296 numbers",
    ),
    "target": (
        lambda about: about | {"target": {"shape": [10**10], "type": "float32"}}, "an example has 10000000000 numbers"
    ),
    "classes": (lambda about: about | {"classes": 10**9}, "classes is 1000000000, it must be from 0 to"),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL_LIES)
def test_a_small_file_of_clients_cannot_ask_for_gigabytes(name: str, tmp_path: Path) -> None:
    run, (lie, told) = logistic(tmp_path), SMALL_LIES[name]
    path = run / "clients.json"
    path.write_text(json.dumps(lie(json.loads(path.read_text()))))
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunFolderError, match=rf"cannot load the run: .*clients\.json .*{told}") as found:
        fedge.load_run(run)
    assert "\n" not in str(found.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB on Linux


def test_a_stand_in_takes_no_room_for_its_clients() -> None:
    """Data that come with their clients: the configuration does not say how many."""
    about = {"clients": 10**12, "classes": 2, "names": []}
    kinds = {"example": {"shape": [3], "type": "float32"}, "target": {"shape": [], "type": "int64"}}
    assert loading._stand_in(about | kinds, {}).clients == 10**12


def test_clients_that_were_dealt_nothing_are_no_lie(tmp_path: Path) -> None:
    run = logistic(tmp_path)
    path = run / "clients.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clients": 4}))
    assert fedge.load_run(run).rounds == 2
