"""Models: parameter counts, shapes, names, gradients and seeds."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedge.models import MODELS, fmnist_cnn, kws_cnn, logistic, mlp, vgg11

SHAPES = {
    "fmnist_cnn": (1, 28, 28),
    "kws_cnn": (1, 50, 16),
    "logistic": (1, 8, 8),
    "mlp": (1, 8, 8),
    "vgg11": (3, 32, 32),
}
COUNTS = {
    "fmnist_cnn": 821_706,
    "kws_cnn": 1_664_522,
    "logistic": 650,
    "mlp": 64 * 32 + 32 + 32 * 10 + 10,
    "vgg11": 9_750_922,
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_model_is_tested() -> None:
    assert set(MODELS) == set(SHAPES) == set(COUNTS)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count(name: str) -> None:
    assert count(MODELS[name]()) == COUNTS[name]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("outputs", [1, 12])
def test_shape_and_outputs(name: str, outputs: int) -> None:
    model = MODELS[name](outputs=outputs, seed=0)
    assert model(torch.randn(3, *SHAPES[name])).shape == (3, outputs)


@pytest.mark.parametrize("name", MODELS)
def test_gradient_reaches_every_parameter(name: str) -> None:
    model = MODELS[name](seed=0)
    x = torch.randn(8, *SHAPES[name], generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(model(x), torch.arange(8)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.norm() > 1e-5, key


@pytest.mark.parametrize("name", MODELS)
def test_no_running_statistics(name: str) -> None:
    model = MODELS[name](seed=0)
    x = torch.randn(2, *SHAPES[name])
    assert not list(model.buffers())
    assert torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("name", ["fmnist_cnn", "mlp"])
def test_per_example_gradients(name: str) -> None:
    """Models run under functional_call and vmap; the mean of the gradients is that of the loss."""
    model = MODELS[name](seed=0)
    params = {key: p.detach() for key, p in model.named_parameters()}
    x, y = torch.randn(4, *SHAPES[name]), torch.arange(4)

    def loss(p: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, p, (a[None],)), b[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    nn.functional.cross_entropy(model(x), y).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(each[key].mean(0), parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (fmnist_cnn, ["conv1", "conv2", "fc1", "fc2"]),
        (kws_cnn, ["conv1", "conv2", "conv3", "fc1", "fc2"]),
        (vgg11, [f"conv{i}" for i in range(1, 9)] + ["fc1", "fc2", "fc3"]),
        (logistic, ["fc1"]),
        (mlp, ["fc1", "fc2"]),
    ],
)
def test_parameter_names(build: Callable[[], nn.Module], layers: list[str]) -> None:
    expected = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    assert [name for name, _ in build().named_parameters()] == expected


@pytest.mark.parametrize("name", MODELS)
def test_seed_decides_the_start(name: str) -> None:
    first, again, other = (MODELS[name](seed=s).state_dict() for s in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if "weight" in key)


def test_seeded_models_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    mlp(seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_global_generator_is_used() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, second = mlp(), mlp()
        torch.manual_seed(1)
        again = mlp()
    assert torch.equal(first.get_parameter("fc1.weight"), again.get_parameter("fc1.weight"))
    assert not torch.equal(first.get_parameter("fc1.weight"), second.get_parameter("fc1.weight"))


def test_seeded_models_follow_the_default_device() -> None:
    with torch.device("meta"):
        model = mlp(seed=1)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("build", "shape", "widths"),
    [
        (fmnist_cnn, (1, 28, 28), (8, 16, 256)),
        (kws_cnn, (1, 50, 16), (8, 16, 32, 128)),
        (vgg11, (3, 32, 32), (32, 64, 128, 128, 256, 256, 256, 256, 256, 256)),
    ],
)
def test_half_width_halves_every_layer(
    build: Callable[..., nn.Module], shape: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    half, whole = build(2, seed=0, width=0.5), build(2, seed=0)
    assert [len(leaf) for name, leaf in half.named_parameters() if name.endswith("weight")] == [*widths, 2]
    assert half(torch.zeros(3, *shape)).shape == (3, 2)
    assert count(half) < 0.27 * count(whole)
    for one, other in zip(build(seed=3, width=1.0).parameters(), build(seed=3).parameters(), strict=True):
        assert torch.equal(one, other)


def test_vgg_starts_from_kaiming() -> None:
    weight = vgg11(seed=0).get_parameter("conv5.weight")
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert not vgg11(seed=0).get_parameter("conv5.bias").any()


def test_vgg_s_head_keeps_the_signal() -> None:
    """He et al. 2015, eq. 10: var(w) = 2 / fan_in before a ReLU; torch's default has a sixth of it."""
    he, default = vgg11(seed=0), vgg11(seed=0, init="torch")
    for name, gain in (("fc1", 2), ("fc2", 2), ("fc3", 1)):
        assert he.get_parameter(f"{name}.weight").std().item() == pytest.approx((gain / 512) ** 0.5, rel=0.03)
        assert not he.get_parameter(f"{name}.bias").any()
        assert default.get_parameter(f"{name}.weight").std().item() == pytest.approx((1 / 3 / 512) ** 0.5, rel=0.03)
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert he(images).std(0).mean() > 2 * default(images).std(0).mean()
    with pytest.raises(ValueError, match="init is 'zero', it must be one of he, torch"):
        vgg11(init="zero")


def test_hidden_layers_may_be_none_or_several() -> None:
    assert count(mlp(4, (), 3)) == count(logistic(4, 3))
    assert count(mlp(4, (5, 6), 3)) == (4 * 5 + 5) + (5 * 6 + 6) + (6 * 3 + 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fmnist_cnn(0), "outputs is 0, must be at least 1"),
        (lambda: kws_cnn(-1), "outputs is -1"),
        (lambda: vgg11(0), "outputs is 0"),
        (lambda: logistic(0), "inputs is 0"),
        (lambda: mlp(4, (3, 0)), r"hidden\[1\] is 0"),
        (lambda: fmnist_cnn(width=0), "width is 0, must be greater than 0"),
    ],
)
def test_bad_widths_are_refused(call: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_vgg_can_have_simonyan_s_dropout() -> None:
    plain, dropping = vgg11(seed=0), vgg11(seed=0, dropout=0.5)
    names = [name for name, part in dropping.named_children() if isinstance(part, torch.nn.Dropout)]
    assert names == ["drop1", "drop2"]
    for (name, one), (other, two) in zip(plain.named_parameters(), dropping.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one, two)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(images), dropping.eval()(images))
    assert not torch.equal(plain(images), dropping.train()(images))
    with pytest.raises(ValueError, match=r"dropout is 1\.0, it must be at least 0 and below 1"):
        vgg11(dropout=1.0)
