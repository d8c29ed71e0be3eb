"""Any learning problem: regression, several labels per example, tokens; against plain loops in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedge
from fedge.engine import Loopback

WAYS = ("stacked", "single", "plain")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(outputs: int = 2, count: int = 60) -> fedge.data.Data:
    """A linear regression with several outputs."""
    g = generator()
    x = torch.randn(count, 5, generator=g, dtype=torch.float64)
    y = x @ torch.randn(5, outputs, generator=g, dtype=torch.float64)
    y = y if outputs > 1 else y[:, 0]
    return fedge.data.from_arrays(x[:48], y[:48], x[48:], y[48:])


def sequences(second: bool = False, classes: int = 7, length: int = 6) -> tuple[fedge.data.Data, nn.Module]:
    """Tokens with some labels that do not count, and a model that gives [N, T, V] or [N, V, T]."""
    g = generator()
    x = torch.randint(classes, (40, length), generator=g)
    y = (x + 1) % classes
    y[torch.rand(y.shape, generator=g) < 0.2] = -100
    y[3] = -100  # an example without any label
    data = fedge.data.from_arrays(x[:30], y[:30], x[30:], y[30:])
    return data, Tagger(classes, second)


class Tagger(nn.Module):
    def __init__(self, classes: int, second: bool) -> None:
        super().__init__()
        g = generator(1)
        self.embed = nn.Embedding(classes, 8, dtype=torch.float64)
        self.out = nn.Linear(8, classes, dtype=torch.float64)
        self.second = second
        with torch.no_grad():
            for leaf in self.parameters():
                leaf.copy_(torch.randn(leaf.shape, generator=g, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(torch.tanh(self.embed(x)))
        return out.transpose(1, 2) if self.second else out


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    with torch.no_grad():
        for leaf in layer.parameters():
            leaf.copy_(torch.linspace(-0.3, 0.4, leaf.numel(), dtype=torch.float64).view(leaf.shape))
    return layer


def one_full_step(model: nn.Module, lists: list, data: fedge.data.Data, loss, lr: float) -> dict[str, Tensor]:
    """FedAvg with one full-batch step per client, by torch's autograd; `loss` of a batch is a mean over examples."""
    total, mean = 0, {name: torch.zeros_like(leaf) for name, leaf in model.named_parameters()}
    for chosen in lists:
        chosen = list(chosen)
        grads = torch.autograd.grad(loss(model(data.train_x[chosen]), data.train_y[chosen]), list(model.parameters()))
        for name, grad in zip(mean, grads, strict=True):
            mean[name] += len(chosen) * grad
        total += len(chosen)
    return {n: leaf.detach() - lr * mean[n] / total for n, leaf in model.named_parameters()}


def agrees(run: fedge.Run, wanted: dict[str, Tensor]) -> None:
    for name, leaf in wanted.items():
        assert torch.allclose(run.params[name], leaf, rtol=0, atol=1e-10), name


LISTS = [range(10), range(10, 17), range(17, 30)]


def step(model: nn.Module, **options) -> fedge.FedAvg:
    return fedge.FedAvg(model, lr=0.3, epochs=1, batch_size=None, **options)


# Regression


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_regression_trains_as_a_plain_loop_and_predicts_its_outputs(outputs: int, way: str) -> None:
    data, model = numbers(outputs), linear(5, outputs)
    federation = fedge.Federation(data, LISTS)
    run = fedge.train(step(model), federation, rounds=1, engine=fedge.Engine(way=way))  # type: ignore[arg-type]
    wanted = one_full_step(model, LISTS, data, lambda out, y: F.mse_loss(out.view(y.shape), y), 0.3)
    agrees(run, wanted)
    out = F.linear(data.test_x, wanted["weight"], wanted["bias"])
    assert torch.allclose(run.predict(data.test_x), out, atol=1e-10)
    assert torch.equal(run.predict(data.test_x), run.scores(data.test_x))


def test_a_regression_has_mse_mae_and_r2_in_its_records() -> None:
    data = numbers(2)
    run = fedge.train(step(linear(5, 2)), fedge.Federation(data, LISTS), rounds=2)
    y, f = data.test_y.numpy(), run.predict(data.test_x).numpy()
    last = run.history[-1]
    assert last["test_mse"] == pytest.approx(((y - f) ** 2).mean(), rel=1e-12)
    assert last["test_loss"] == pytest.approx(last["test_mse"], rel=1e-12)
    assert last["test_mae"] == pytest.approx(np.abs(y - f).mean(), rel=1e-12)
    parts = 1 - ((y - f) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
    assert last["test_r2"] == pytest.approx(parts.mean(), rel=1e-9)
    assert "test_accuracy" not in last
    assert "test loss" in repr(run)


def test_targets_of_any_shape() -> None:
    g = generator()
    x = torch.randn(30, 6, generator=g, dtype=torch.float64)
    y = torch.randn(30, 2, 3, generator=g, dtype=torch.float64)
    data = fedge.data.from_arrays(x[:20], y[:20], x[20:], y[20:])
    model = nn.Sequential(linear(6, 6), nn.Unflatten(1, (2, 3)))
    lists = [range(12), range(12, 20)]
    run = fedge.train(step(model), fedge.Federation(data, lists), rounds=1)
    agrees(run, one_full_step(model, lists, data, F.mse_loss, 0.3))
    assert run.predict(data.test_x).shape == (10, 2, 3)


def test_a_large_squared_error_is_not_called_a_divergence() -> None:
    data = numbers(1)
    far = fedge.data.from_arrays(data.train_x, 1e3 * data.train_y + 1e5, data.test_x, 1e3 * data.test_y + 1e5)
    run = fedge.train(fedge.FedAvg(linear(5, 1), lr=1e-6), fedge.Federation(far, LISTS), rounds=1)
    assert run.history[-1]["test_loss"] > 1e6
    assert run.diverged is None


# Losses that do not fit


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            nn.MSELoss(),
            r"returned shape \[\] for 2 examples; it must return one value per example \(reduction='none'\)",
        ),
        (nn.MSELoss(reduction="none"), r"returned shape \[2, 3\].* gave one per number: .*flatten\(1\).mean\(1\)"),
        ("mse", r"loss is 'mse', it must be a function of outputs and targets: write loss=fedge.losses.mse"),
    ],
)
def test_a_loss_that_does_not_fit_is_explained(loss, words: str) -> None:
    data = numbers(3)
    with pytest.raises((ValueError, TypeError), match=words):
        fedge.train(step(linear(5, 3), loss=loss), fedge.Federation(data, LISTS), rounds=1)


def test_a_loss_that_pairs_every_output_with_every_target_is_explained() -> None:
    data = numbers(1)
    algorithm = step(linear(5, 1), loss=lambda out, y: (out - y) ** 2)
    with pytest.raises(ValueError, match=r"paired outputs of shape \[2, 1\] with targets of shape \[2\].*out\[:, 0\]"):
        fedge.train(algorithm, fedge.Federation(data, LISTS), rounds=1)


def test_floating_point_classes_are_refused_with_the_remedy() -> None:
    data = numbers(1)
    with pytest.raises(ValueError, match=r"outputs of shape \[4\] and .*targets of shape \[\].*y.long\(\)"):
        fedge.train(step(linear(5, 4)), fedge.Federation(data, LISTS), rounds=1)


def test_fedova_is_for_classes_alone() -> None:
    inner = fedge.FedAvg(linear(5, 2))
    with pytest.raises(ValueError, match="needs one class number per example, these are floating-point targets"):
        fedge.train(fedge.FedOVA(inner, classes=2), fedge.Federation(numbers(1), LISTS), rounds=1)
    data, model = sequences()
    with pytest.raises(ValueError, match="these are several labels per example"):
        fedge.train(fedge.FedOVA(fedge.FedAvg(model)), fedge.Federation(data, LISTS), rounds=1)


# Several labels per example


def test_labels_that_hold_or_not() -> None:
    g = generator()
    x = torch.randn(60, 5, generator=g, dtype=torch.float64)
    y = (x[:, :3] + 0.1 * torch.randn(60, 3, generator=g) > 0).double()
    data = fedge.data.from_arrays(x[:48], y[:48], x[48:], y[48:])
    model = linear(5, 3)
    run = fedge.train(step(model, loss=fedge.losses.bce), fedge.Federation(data, LISTS), rounds=1)
    agrees(run, one_full_step(model, LISTS, data, F.binary_cross_entropy_with_logits, 0.3))
    guess = run.predict(data.test_x)
    assert torch.equal(guess, (run.scores(data.test_x) > 0).double())
    last = run.history[-1]
    assert last["test_accuracy"] == pytest.approx(float((guess == data.test_y).double().mean()))
    both = float((guess * data.test_y).sum())
    assert last["test_f1"] == pytest.approx(2 * both / float(guess.sum() + data.test_y.sum()))


# Tokens


def per_example(out: Tensor, y: Tensor) -> Tensor:
    """The mean over the counted labels of every example, by a plain loop; the mean of that over examples."""
    found = []
    for one, labels in zip(out, y, strict=True):
        rows = [F.cross_entropy(one[t], labels[t]) for t in range(len(labels)) if labels[t] != -100]
        found.append(torch.stack(rows).mean() if rows else out.new_zeros(()))
    return torch.stack(found).mean()


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_train_as_a_plain_loop(second: bool, way: str) -> None:
    data, model = sequences(second)
    run = fedge.train(step(model), fedge.Federation(data, LISTS), rounds=1, engine=fedge.Engine(way=way))  # type: ignore[arg-type]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return per_example(out.transpose(1, 2) if second else out, y)

    agrees(run, one_full_step(model, LISTS, data, loss, 0.3))
    assert run.predict(data.test_x).shape == data.test_y.shape
    counted = data.test_y != -100
    right = (run.predict(data.test_x) == data.test_y)[counted].double().mean()
    assert run.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)
    out = run.scores(data.test_x)
    flat = (out.transpose(1, 2) if second else out)[counted]
    assert run.history[-1]["test_perplexity"] == pytest.approx(math.exp(F.cross_entropy(flat, data.test_y[counted])))


def test_what_is_ignored_is_inert() -> None:
    """Whatever stands in a place whose label does not count changes no gradient."""
    data, model = sequences()
    other = data.train_x.clone()
    other[data.train_y == -100] = 0
    runs = [
        fedge.train(step(model), fedge.Federation(one, LISTS), rounds=1)
        for one in (data, fedge.data.from_arrays(other, data.train_y, data.test_x, data.test_y))
    ]
    agrees(runs[0], runs[1].params)


def test_padding_may_have_a_label_of_its_own() -> None:
    data, model = sequences()
    zero = [torch.where(y == -100, 0, y) for y in (data.train_y, data.test_y)]
    padded = fedge.data.from_arrays(data.train_x, zero[0], data.test_x, zero[1])
    entropy = fedge.losses.CrossEntropy(ignore_index=0)
    run = fedge.train(step(model, loss=entropy), fedge.Federation(padded, LISTS), rounds=1)
    agrees(
        run,
        one_full_step(model, LISTS, data, lambda out, y: per_example(out, torch.where(y == 0, -100, y)), 0.3),
    )
    counted = padded.test_y != 0
    right = (run.predict(data.test_x) == padded.test_y)[counted].double().mean()
    assert run.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)


def test_where_both_axes_fit_the_loss_has_to_say_which() -> None:
    data, model = sequences(classes=6, length=6)
    federation = fedge.Federation(data, LISTS)
    with pytest.raises(ValueError, match=r"may be on the second axis or on the last; say which, .*CrossEntropy\(axis"):
        fedge.train(step(model), federation, rounds=1)
    run = fedge.train(step(model, loss=fedge.losses.CrossEntropy(axis=-1)), federation, rounds=1)
    agrees(run, one_full_step(model, LISTS, data, per_example, 0.3))


def test_outputs_that_do_not_fit_the_labels_are_named() -> None:
    data, _ = sequences()
    with pytest.raises(ValueError, match=r"do not fit labels of shape \[1, 6\]: .* \[1, 6, C\] or \[1, C, 6\]"):
        fedge.train(step(nn.Sequential(nn.Embedding(7, 3), nn.Flatten())), fedge.Federation(data, LISTS), rounds=1)
    with pytest.raises(ValueError, match="the model has 5 outputs, but there is a label 6"):
        fedge.train(step(nn.Embedding(7, 5)), fedge.Federation(data, LISTS[:1]), rounds=1)


@pytest.mark.parametrize("kind", ["numbers", "tokens"])
def test_the_loop_back_link_agrees(kind: str) -> None:
    data, model = sequences(True) if kind == "tokens" else (numbers(2), linear(5, 2))
    federation, algorithm = fedge.Federation(data, LISTS), fedge.FedAvg(model, lr=0.1, epochs=2, batch_size=4)
    one = fedge.train(algorithm, federation, rounds=2)
    other = fedge.train(algorithm, federation, rounds=2, link=Loopback(algorithm, federation))
    agrees(one, other.params)
    assert one.history[-1]["test_loss"] == pytest.approx(other.history[-1]["test_loss"], rel=1e-9)


def test_second_order_methods_take_numbers_and_tokens() -> None:
    data, model = sequences()
    for algorithm, federation in (
        (fedge.SubspaceNewton(model, epochs=1), fedge.Federation(data, LISTS)),
        (fedge.FisherLBFGS(linear(5, 2), lr=0.05), fedge.Federation(numbers(2), LISTS)),
    ):
        run = fedge.train(algorithm, federation, rounds=2)
        assert math.isfinite(run.history[-1]["test_loss"])


def test_a_run_that_is_loaded_predicts_the_same(tmp_path: Path) -> None:
    data, model = sequences(True)
    algorithm = step(model)
    run = fedge.train(algorithm, fedge.Federation(data, LISTS), rounds=1, out=tmp_path / "tokens")
    again = fedge.load_run(tmp_path / "tokens", algorithm)
    assert torch.equal(again.predict(data.test_x), run.predict(data.test_x))


# Labels that do not count up from 0


def test_labels_that_start_at_one_are_mapped_and_mapped_back(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    g = generator()
    x = torch.randn(40, 4, generator=g)
    plain = x[:, :3].argmax(1)
    zero = fedge.data.from_arrays(x[:30], plain[:30], x[30:], plain[30:])
    assert not caplog.records
    one = fedge.data.from_arrays(x[:30], plain[:30] + 1, x[30:], plain[30:] + 1)
    assert "the labels are 1 to 3: inside they are numbered 0 to 2" in caplog.text
    assert torch.equal(one.train_y, zero.train_y)
    model = fedge.models.logistic(4, 3, seed=0)
    algorithm = fedge.FedAvg(model)
    runs = [
        fedge.train(algorithm, fedge.Federation(d, LISTS), rounds=1, out=tmp_path / str(n))
        for n, d in enumerate((zero, one))
    ]
    assert torch.equal(runs[1].predict(x), runs[0].predict(x) + 1)
    assert torch.equal(fedge.load_run(tmp_path / "1", algorithm).predict(x), runs[1].predict(x))


def test_labels_that_are_words_are_predicted_as_words(tmp_path: Path) -> None:
    x = torch.randn(40, 4, generator=generator())
    states = np.array(["worn", "cracked", "healthy"])[x[:, :3].argmax(1)]
    data = fedge.data.from_arrays(x[:30], states[:30], x[30:], states[30:], names=("Risse", "gut", "alt"))
    algorithm = fedge.FedAvg(fedge.models.logistic(4, 3, seed=0), lr=0.5)
    run = fedge.train(algorithm, fedge.Federation(data, LISTS), rounds=20, out=tmp_path / "run")
    guess = run.predict(x[30:])
    assert isinstance(guess, np.ndarray)
    assert (guess == states[30:]).mean() == pytest.approx(run.history[-1]["test_accuracy"])
    assert guess.tolist() == [("cracked", "healthy", "worn")[at] for at in run.scores(x[30:]).argmax(1)]
    assert (fedge.load_run(tmp_path / "run", algorithm).predict(x[30:]) == guess).all()


def test_gaps_words_and_names() -> None:
    x = np.zeros((4, 2), np.float32)
    gaps = fedge.data.from_arrays(x, [2, 5, 9, 5], x[:2], [9, -1])
    assert gaps.values == (-1, 2, 5, 9)
    assert gaps.train_y.tolist() == [1, 2, 3, 2]
    words = fedge.data.from_arrays(x, ["cat", "ant", "cat", "dog"], x[:2], ["dog", "cat"])
    assert words.names == ("ant", "cat", "dog")
    assert words.train_y.tolist() == [1, 0, 1, 2]
    assert words.values == words.names
    objects = fedge.data.from_arrays(x, np.array(["cat", "ant", "cat", "dog"], object), x[:2], ["dog", "cat"])
    assert objects.train_y.tolist() == [1, 0, 1, 2]
    named = fedge.data.from_arrays(x, [0, 2, 2, 0], x[:2], [0, 2], names=("a", "b", "c"))
    assert named.classes == 3
    assert not named.values


def test_targets_that_look_like_a_regression_are_refused() -> None:
    x = np.zeros((400, 2), np.float32)
    with pytest.raises(ValueError, match="there are 400 different whole numbers among 400 targets: for a regression"):
        fedge.data.from_arrays(x[:300], 7 * np.arange(300), x[300:], 7 * np.arange(300, 400))
    with pytest.raises(ValueError, match=r"train_y\[0\] is 7, .*leave out classes= of from_arrays"):
        fedge.data.from_arrays(x[:2], [7, 1], x[2:4], [1, 1], classes=2)
    with pytest.raises(ValueError, match=r"train_y\[0, 1\] is -1, .*labels that do not count are -100"):
        fedge.data.from_arrays(x[:2], [[1, -1], [1, 1]], x[2:4], [[1, 1], [0, 0]])


def test_targets_far_from_zero_are_said_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(40, 5, generator=generator())
    y = 2000 + 500 * x[:, 0]
    for _ in range(2):
        data = fedge.data.from_arrays(x[:30], y[:30], x[30:], y[30:])
        fedge.train(fedge.FedAvg(linear(5, 1), lr=1e-4), fedge.Federation(data, LISTS), rounds=1)
    (said,) = [one.getMessage() for one in caplog.records]
    mean, deviation = float(y[:30].mean()), float(y[:30].std(correction=0))
    assert f"the targets have mean {mean:.4g} and standard deviation {deviation:.4g}" in said
    assert f"train on (y - {mean:.4g}) / {deviation:.4g} and turn predictions back, or lower lr" in said


def test_labels_that_are_hardly_ever_the_same_are_asked_about(caplog: pytest.LogCaptureFixture) -> None:
    """As when the wrong column of a table is taken; 60 examples of 20 classes are in order."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    for classes, wanted in ((20, 0), (50, 1)):
        y = torch.arange(60) % classes
        data = fedge.data.from_arrays(x, y, x[:classes], y[:classes])
        federation = fedge.Federation(data, [torch.arange(30), torch.arange(30, 60)])
        caplog.clear()
        for _ in range(2):
            fedge.train(fedge.FedAvg(fedge.models.mlp(4, (8,), classes, seed=0)), federation, rounds=1)
        said = [one.getMessage() for one in caplog.records if "different labels" in one.getMessage()]
        assert len(said) == wanted, said
    assert "50 different labels in 60 training examples: is this the column of labels?" in said[0]
