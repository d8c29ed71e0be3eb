"""Sanity of the references themselves: each against algebra that does not need them."""

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.reference.common import (
    Client,
    example_gradients,
    flat,
    flatten,
    gradient,
    mean_loss,
    named,
)
from tests.reference.curvature import (
    batch_square,
    fisher_diagonal,
    fisher_product,
    gauss_newton_product,
)
from tests.reference.fedavg import fedavg
from tests.reference.feddane import feddane
from tests.reference.fedova import fedova, fedova_predict
from tests.reference.fisher_lbfgs import fisher_lbfgs, offer
from tests.reference.two_loop import dense_bfgs, two_loop

D, C = 4, 3
LBFGS = {
    "epochs": 2,
    "batch_size": 3,
    "local_lr": 0.1,
    "lr": 1.0,
    "memory": 5,
    "damping": 0.1,
    "weight_decay": 0.05,
    "first_step": None,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads only get in the way of tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rng(*address: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(a * 101**i for i, a in enumerate(address)))


def make(*layers: nn.Module) -> nn.Module:
    """A float64 model whose parameters come from an own generator."""
    module, generator = nn.Sequential(*layers).double(), rng(5)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return module


def linear(outputs: int = C) -> nn.Module:
    return make(nn.Linear(D, outputs))


def mlp(outputs: int = C) -> nn.Module:
    return make(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, outputs))


def client(n: int, seed: int, classes: int = C) -> Client:
    x = torch.randn(n, D, generator=rng(seed, 1), dtype=torch.float64)
    return x, torch.randint(classes, (n,), generator=rng(seed, 2))


def order(t: int, p: int, k: int, epochs: int, batch_size: int | None) -> list[Tensor]:
    """Shuffled batches of clients with 6 + k examples."""
    batches = []
    for epoch in range(epochs):
        shuffled = torch.randperm(6 + k, generator=rng(t, p, k, epoch))
        batches += shuffled.split(batch_size or 6 + k)
    return batches


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


CLIENTS = [client(6 + k, seed=k) for k in range(4)]
THREE_PHASES = [[[0, 1, 2]] * 3, [[1, 3]] * 3, [[0, 2, 3]] * 3]


def test_references_do_not_import_the_library() -> None:
    for path in (Path(__file__).parent / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            assert "fedge" not in [name.split(".")[0] for name in names]
            assert (getattr(node, "module", None) or "").split(".")[0] != "fedge"


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_two_loop_is_the_dense_bfgs_matrix(memory: int) -> None:
    root = torch.randn(8, 8, generator=rng(1), dtype=torch.float64)
    steps = torch.randn(memory, 8, generator=rng(2), dtype=torch.float64)
    pairs = [(s, (root @ root.T + torch.eye(8)) @ s) for s in steps]
    g = torch.randn(8, generator=rng(3), dtype=torch.float64)
    h = dense_bfgs(pairs)
    torch.testing.assert_close(two_loop(pairs, g), h @ g, rtol=1e-12, atol=1e-12)
    newest_s, newest_y = pairs[-1]
    torch.testing.assert_close(h @ newest_y, newest_s)  # the secant equation


def test_gauss_newton_is_the_hessian_of_a_linear_model() -> None:
    module, (x, y) = linear(), client(9, seed=7)
    v = torch.randn(len(flat(module)), generator=rng(8), dtype=torch.float64)
    params = list(module.parameters())
    grads = torch.autograd.grad(mean_loss(module, x, y), params, create_graph=True)
    slope = torch.cat([grad.reshape(-1) for grad in grads]) @ v
    product = torch.cat([h.reshape(-1) for h in torch.autograd.grad(slope, params)])
    assert_same(gauss_newton_product(module, x, y, named(module, v)), named(module, product))


def test_gauss_newton_is_the_fisher_over_the_models_own_labels() -> None:
    module, (x, y) = mlp(), client(5, seed=7)
    v = torch.randn(len(flat(module)), generator=rng(8), dtype=torch.float64)
    expected = torch.zeros_like(v)
    for i in range(len(y)):
        p = torch.softmax(module(x[i : i + 1])[0], dim=0).detach()
        for c in range(C):
            g = gradient(module, x[i : i + 1], torch.tensor([c]))
            expected += p[c] * g * (g @ v) / len(y)
    assert_same(gauss_newton_product(module, x, y, named(module, v)), named(module, expected))


def test_fisher_forms_agree_with_the_explicit_matrix() -> None:
    module, (x, y) = mlp(), client(9, seed=7)
    v = torch.randn(len(flat(module)), generator=rng(8), dtype=torch.float64)
    fisher = sum(torch.outer(g, g) for g in example_gradients(module, x, y)) / len(y)
    assert_same(fisher_diagonal(module, x, y), named(module, torch.diag(fisher)))
    assert_same(fisher_product(module, x, y, named(module, v)), named(module, fisher @ v))
    single = [(x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    assert_same(batch_square(module, single), named(module, torch.diag(fisher)))
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    expected = (2 * gradient(module, *parts[0]) ** 2 + 7 * gradient(module, *parts[1]) ** 2) / 9
    assert_same(batch_square(module, parts), named(module, expected))


def test_fedavg_of_one_full_batch_is_one_step_on_all_data() -> None:
    module, start = mlp(), flat(mlp())
    x = torch.cat([x for x, _ in CLIENTS])
    y = torch.cat([y for _, y in CLIENTS])
    expected = named(module, start - 0.3 * gradient(module, x, y))

    def everything(*_: object) -> list[Tensor]:
        return [torch.arange(len(y))]

    options = {"lr": 0.3, "epochs": 1, "batch_size": None}
    assert_same(fedavg(module, [(x, y)], [[[0]]], everything, **options), expected)
    assert_same(fedavg(module, CLIENTS, [[[0, 1, 2, 3]]], order, **options), expected)
    assert torch.equal(flat(module), start)


def test_fedavg_with_one_client_is_momentum_on_the_server() -> None:
    module, (x, y) = mlp(), CLIENTS[0]
    result = fedavg(
        module,
        CLIENTS,
        [[[0]]] * 3,
        order,
        lr=0.1,
        epochs=1,
        batch_size=None,
        server_lr=0.5,
        server_momentum=0.9,
    )
    plain = copy.deepcopy(module)
    rule = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        rule.zero_grad()
        mean_loss(plain, x, y).backward()
        rule.step()
    assert_same(result, named(module, flat(plain)))


def test_fedavg_adam_steps_have_the_step_size() -> None:
    module = mlp()
    options = {"lr": 0.01, "epochs": 1, "batch_size": None, "server_eps": 0.0, "server_lr": 0.1}
    local = fedavg(module, CLIENTS, [[[0]]], order, optimiser="adam", **options | {"server_lr": 1})
    server = fedavg(module, CLIENTS, [[[0]]], order, server_optimiser="adam", **options)
    sign = gradient(module, *CLIENTS[0]).sign()
    moved = flatten(module, local) - flat(module)
    torch.testing.assert_close(moved, -0.01 * sign, rtol=1e-4, atol=0)
    moved = flatten(module, server) - flat(module)
    torch.testing.assert_close(moved, -0.1 * sign)


def test_feddane_alone_is_plain_sgd() -> None:
    options = {"lr": 0.1, "epochs": 2, "batch_size": 3}
    dane = feddane(mlp(), CLIENTS, [[[0], [0]]] * 2, lambda t, p, *a: order(t, 0, *a), mu=0, **options)
    assert_same(dane, fedavg(mlp(), CLIENTS, [[[0]]] * 2, order, **options))


def test_feddane_first_step_follows_the_other_cohorts_gradient() -> None:
    module = mlp()
    dane = feddane(module, CLIENTS, [[[0, 1], [2, 3]]], order, lr=0.1, epochs=1, batch_size=None, mu=3.0)
    g = (6 * gradient(module, *CLIENTS[0]) + 7 * gradient(module, *CLIENTS[1])) / 13
    assert_same(dane, named(module, flat(module) - 0.1 * g))


def test_lbfgs_without_memory_is_fedavg() -> None:
    options = LBFGS | {"memory": 0, "weight_decay": 0.0}
    step, refused = fisher_lbfgs(mlp(), CLIENTS, THREE_PHASES, order, source="update", **options)
    assert refused == 0
    assert_same(step, fedavg(mlp(), CLIENTS, THREE_PHASES, order, lr=0.1, epochs=2, batch_size=3))


@pytest.mark.parametrize("curvature", ["diagonal", "product"])
@pytest.mark.parametrize("curvature_at", ["same", "next"])
def test_lbfgs_second_step_by_the_dense_matrix(curvature: str, curvature_at: str) -> None:
    module, everyone = mlp(), [[[0, 1, 2, 3]] * 2] * 2
    x = torch.cat([x for x, _ in CLIENTS])
    y = torch.cat([y for _, y in CLIENTS])
    decay, damping = LBFGS["weight_decay"], LBFGS["damping"]
    w = flat(module)
    g = gradient(module, x, y) + decay * w
    s = -g * min(1.0, 1 / g.norm())
    moved = copy.deepcopy(module)
    moved.load_state_dict(named(module, w + s))
    where = module if curvature_at == "same" else moved
    fisher = sum(torch.outer(g, g) for g in example_gradients(where, x, y)) / len(y)
    fisher = torch.diag(torch.diag(fisher)) if curvature == "diagonal" else fisher
    h = dense_bfgs([(s, fisher @ s + (decay + damping) * s)])
    expected = w + s - h @ (gradient(moved, x, y) + decay * (w + s))
    options = LBFGS | {"curvature": curvature, "curvature_at": curvature_at}
    result, refused = fisher_lbfgs(module, CLIENTS, everyone, order, **options)
    assert refused == 0
    assert_same(result, named(module, expected), tolerance=1e-10)


def test_lbfgs_on_a_quadratic_does_not_care_where_the_curvature_is_taken() -> None:
    def squared(output: Tensor, target: Tensor) -> Tensor:
        return ((output[0] - target) ** 2) / 2

    everyone = [[[0, 1, 2, 3]] * 3] * 15
    options = {"curvature": "product", "matrix": "gauss_newton", "loss": squared, **LBFGS}
    options |= {"damping": 0.0, "memory": 10}
    same, _ = fisher_lbfgs(linear(1), CLIENTS, everyone, order, **options)
    later, _ = fisher_lbfgs(linear(1), CLIENTS, everyone, order, curvature_at="next", **options)
    tried, _ = fisher_lbfgs(linear(1), CLIENTS, everyone, order, candidates=(1.0,), **options)
    assert_same(same, later, tolerance=1e-9)
    assert_same(same, tried, tolerance=1e-9)

    x = torch.cat([x for x, _ in CLIENTS])
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)  # the last column is the bias
    y = torch.cat([y for _, y in CLIENTS]).double()
    ridge = x.T @ x / len(y) + LBFGS["weight_decay"] * torch.eye(D + 1)
    optimum = torch.linalg.solve(ridge, x.T @ y / len(y))
    torch.testing.assert_close(flatten(linear(1), same), optimum, rtol=1e-6, atol=1e-6)


def test_lbfgs_takes_the_best_candidate() -> None:
    options = LBFGS | {"first_step": 1.0, "lr": 0.5}
    cohorts = [[[0, 1], [2, 3]]]
    losses, results = [], []
    for a in (0.1, 0.5, 1.0, 4.0):
        result, _ = fisher_lbfgs(mlp(), CLIENTS, cohorts, order, **options | {"lr": 0.5 * a})
        moved = mlp()
        moved.load_state_dict(result)
        own = [mean_loss(moved, *CLIENTS[k]).item() for k in (2, 3)]
        penalty = LBFGS["weight_decay"] / 2 * (flat(moved) @ flat(moved)).item()
        losses.append((8 * own[0] + 9 * own[1]) / 17 + penalty)
        results.append(result)
    best = results[losses.index(min(losses))]
    chosen, _ = fisher_lbfgs(mlp(), CLIENTS, cohorts, order, candidates=(0.1, 0.5, 1.0, 4.0), **options)
    assert_same(chosen, best)


def test_bad_pairs_are_refused_and_old_ones_dropped() -> None:
    s, pairs = torch.ones(2, dtype=torch.float64), []
    assert offer(pairs, (s, -s), 2, 1e-8) == 1
    assert offer(pairs, (0 * s, 0 * s), 2, 1e-8) == 1
    assert offer(pairs, (s, s * torch.nan), 2, 1e-8) == 1
    assert pairs == []
    for i in (1, 2, 3):
        assert offer(pairs, (i * s, s), 2, 1e-8) == 0
    assert [pair[0][0].item() for pair in pairs] == [2, 3]


def test_fedova_skips_classes_nobody_in_the_cohort_holds() -> None:
    module, options = mlp(2), {"lr": 0.1, "epochs": 1, "batch_size": 3, "server_momentum": 0.9}
    labels = [[0, 1], [1, 2], [0, 2]]  # class 3 is held by nobody
    clients = [(client(6 + k, seed=k)[0], torch.tensor((own * 6)[: 6 + k])) for k, own in enumerate(labels)]
    cohorts = [[[0, 1]], [[1]], [[2]]]
    params = fedova(fedavg, module, clients, cohorts, order, 4, **options)
    groups = [[[0], [], [2]], [[0, 1], [1], []], [[1], [1], [2]], [[], [], []]]
    for c, group in enumerate(groups):
        binary = [(x, (y == c).long()) for x, y in clients]
        own = fedavg(module, binary, [[g] for g in group], order, weight=lambda n: 1, **options)
        assert_same({name: stack[c] for name, stack in params.items()}, own)
    assert_same({name: stack[3] for name, stack in params.items()}, named(module, flat(module)))
    weighted = fedova(fedavg, module, clients, cohorts, order, 4, weighted=True, **options)
    assert not torch.equal(weighted["0.weight"][1], params["0.weight"][1])
    assert torch.equal(weighted["0.weight"][0], params["0.weight"][0])


def test_fedova_predicts_the_largest_margin() -> None:
    module = linear(2)
    params = {name: torch.stack([value, 2 * value, -value]) for name, value in named(module, flat(module)).items()}
    x = client(20, seed=1)[0]
    logits = module(x)
    expected = torch.where(logits[:, 1] > logits[:, 0], 1, 2)
    assert torch.equal(fedova_predict(module, params, x), expected)


@pytest.mark.parametrize("reference", [feddane, fisher_lbfgs])
def test_fedova_takes_every_loop(reference: object) -> None:
    options = LBFGS if reference is fisher_lbfgs else {"lr": 0.1, "epochs": 1, "batch_size": 3, "mu": 1}
    params = fedova(reference, mlp(2), CLIENTS, THREE_PHASES, order, C, **options)
    assert params["0.weight"].shape == (C, 5, D)
    assert all(torch.isfinite(stack).all() for stack in params.values())
