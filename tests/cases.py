"""What many tests need: small ragged federations, small models, and one table of every algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedge
from fedge.core import Algorithm


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toy_data(examples: int = 90, inputs: int = 6, classes: int = 3, seed: int = 0) -> fedge.data.Data:
    """Gaussian clusters in float64: easy enough to learn, noisy enough to have real gradients."""
    g = generator(seed)
    centres = 2 * torch.randn(classes, inputs, generator=g, dtype=torch.float64)
    y = torch.arange(examples + 30) % classes
    x = centres[y] + torch.randn(examples + 30, inputs, generator=g, dtype=torch.float64)
    return fedge.data.Data(x[:examples], y[:examples], x[examples:], y[examples:], classes)


def ragged(data: fedge.data.Data, sizes: tuple[int, ...] = (3, 17, 8, 1, 24, 9, 28)) -> fedge.Federation:
    """Clients of very different sizes, the labels dealt unevenly: most hold two of the classes, one holds one."""
    order = torch.argsort(data.train_y, stable=True)
    order = torch.roll(order, 11)
    cuts = [0, *itertools.accumulate(sizes)]
    assert cuts[-1] == len(order)
    return fedge.Federation(data, [order[a:b].numpy() for a, b in itertools.pairwise(cuts)])


def one_holder(client: int = 2, label: int = 2) -> fedge.Federation:
    """Five clients in single precision, one of which alone holds a class, and nothing else."""
    data = toy_data()
    data = replace(data, train_x=data.train_x.float(), test_x=data.test_x.float())
    lists = [one.numpy() for one in (data.train_y != label).nonzero().flatten().chunk(4)]
    lists.insert(client, (data.train_y == label).nonzero().flatten().numpy())
    return fedge.Federation(data, lists)


def toy_model(inputs: int = 6, outputs: int = 3, seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    return fedge.models.mlp(inputs, (5,), outputs, seed=seed).to(dtype)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two sets of parameters."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def goes_on_as_it_began(algorithm: Algorithm[Any], federation: fedge.Federation, out: Path, **engine: Any) -> None:
    """Bit for bit, whatever of layers in C the second half of a run is told."""
    options: dict[str, Any] = {"seed": 5, "observe": fedge.Observe(checkpoint_every=1)}
    for flag, other in ((None, False), (False, None)):
        first, second = (fedge.Engine(compile=one, **engine) for one in (flag, other))
        whole = fedge.train(algorithm, federation, rounds=4, engine=first, **options)
        folder = out / str(flag)
        fedge.train(algorithm, federation, rounds=2, engine=first, out=folder, **options)
        rest = fedge.train(algorithm, federation, rounds=4, engine=second, out=folder, resume=True, **options)
        assert close(whole.params, rest.params) == 0


def first_order(outputs: int = 3) -> dict[str, Algorithm]:
    model = toy_model(outputs=outputs)
    return {
        "fedavg": fedge.FedAvg(model, lr=0.2, epochs=2, batch_size=4),
        "fedavg_full_batch": fedge.FedAvg(model, lr=0.2, epochs=3, batch_size=None),
        "fedavg_momentum": fedge.FedAvg(model, lr=0.05, epochs=2, batch_size=5, momentum=0.9, weight_decay=0.01),
        "fedavg_adam": fedge.FedAvg(model, lr=0.01, epochs=2, batch_size=4, optimiser="adam", weight_decay=0.01),
        "fedavg_server_momentum": fedge.FedAvg(model, epochs=1, batch_size=7, server_momentum=0.5, server_lr=0.7),
        "fedavg_server_adam": fedge.FedAvg(model, epochs=1, batch_size=7, server_optimiser="adam", server_lr=0.05),
        "fedavg_decay": fedge.FedAvg(model, lr=0.2, lr_decay=0.7, epochs=2, batch_size=4, momentum=0.5),
        "fedavg_adam_decay": fedge.FedAvg(model, lr=0.01, lr_decay=0.7, epochs=2, batch_size=4, optimiser="adam"),
        "fedavg_clip": fedge.FedAvg(model, lr=0.2, epochs=2, batch_size=4, clip=0.4),
        "fedavg_inner": fedge.FedAvg(model, lr=0.2, inner_decay=0.3, epochs=2, batch_size=4, momentum=0.5),
        "fedavg_carried": fedge.FedAvg(model, lr=0.05, epochs=2, batch_size=4, momentum=0.9, carry_momentum=True),
        "spectral": fedge.FedAvg(model, lr=0.02, epochs=2, batch_size=4, optimiser="spectral", weight_decay=0.01),
        "spectral_fast": fedge.FedAvg(model, lr=0.02, epochs=2, batch_size=4, optimiser="spectral_fast"),
        "spectral_carried": fedge.FedAvg(
            model,
            lr=0.02,
            lr_decay=0.8,
            inner_decay=0.3,
            epochs=2,
            batch_size=4,
            optimiser="spectral",
            carry_momentum=True,
        ),
        "spectral_server": fedge.FedAvg(
            model, epochs=1, batch_size=7, server_optimiser="spectral", server_momentum=0.5
        ),
        "soap_server": fedge.FedAvg(model, epochs=1, batch_size=7, server_optimiser="soap", server_lr_decay=0.9),
        "shampoo_server": fedge.FedAvg(
            model, epochs=1, batch_size=7, server_optimiser="shampoo", server_momentum=0.5, server_warmup=2
        ),
        "fedcm": fedge.FedCM(model, lr=0.2, alpha=0.4, epochs=2, batch_size=4),
        "fedcm_spectral": fedge.FedCM(model, lr=0.2, alpha=0.4, epochs=2, batch_size=4, server_optimiser="spectral"),
        "fedcm_decay": fedge.FedCM(model, lr=0.2, alpha=0.4, lr_decay=0.7, inner_decay=0.3, epochs=2, batch_size=4),
        "fedprox": fedge.FedProx(model, lr=0.1, mu=0.3, epochs=2, batch_size=4, momentum=0.5, lr_decay=0.8),
        "foof": fedge.FOOF(model, lr=0.1, damping=0.2, epochs=2, batch_size=4),
        "foof_decay": fedge.FOOF(
            model, lr=0.1, damping=0.2, largest_side=6, epochs=2, batch_size=4, momentum=0.5, inner_decay=0.3, clip=0.8
        ),
        "fednova": fedge.FedNova(model, lr=0.1, epochs=2, batch_size=4, momentum=0.5, server_momentum=0.3),
        "fednova_decay": fedge.FedNova(model, lr=0.1, epochs=2, batch_size=4, lr_decay=0.8, inner_decay=0.3, clip=0.8),
        "scaffold": fedge.SCAFFOLD(model, lr=0.1, epochs=2, batch_size=4, clients=7),
        "scaffold_counted": fedge.SCAFFOLD(model, lr=0.1, epochs=2, batch_size=4, weight_decay=0.01, server_lr=0.8),
        "scaffold_average": fedge.SCAFFOLD(model, lr=0.1, epochs=2, batch_size=4, clients=7, control="average"),
        "scaffold_weighted": fedge.SCAFFOLD(
            model, lr=0.1, epochs=2, batch_size=4, weighted=True, lr_decay=0.8, inner_decay=0.3, clip=0.8
        ),
        "fedper": fedge.FedPer(model, lr=0.1, epochs=2, batch_size=4, momentum=0.5),
        "fedper_decay": fedge.FedPer(model, ("fc1",), lr=0.1, epochs=2, batch_size=4, lr_decay=0.8, inner_decay=0.3),
        "shared_ova": fedge.SharedOVA(model, lr=0.2, epochs=2, batch_size=4, server_momentum=0.3),
        "shared_ova_inner": fedge.SharedOVA(model, lr=0.2, inner_decay=0.3, lr_decay=0.8, epochs=2, batch_size=4),
        "feddane_inner": fedge.FedDANE(model, lr=0.1, inner_decay=0.3, epochs=2, batch_size=4, cohort="new"),
        "feddane_clip": fedge.FedDANE(model, lr=0.1, epochs=2, batch_size=4, clip=0.4),
        "feddane_decay": fedge.FedDANE(model, lr=0.1, lr_decay=0.7, epochs=2, batch_size=4),
        "feddane": fedge.FedDANE(model, lr=0.1, epochs=2, batch_size=4, mu=0.2),
        "feddane_new_cohort": fedge.FedDANE(model, lr=0.1, epochs=2, batch_size=4, cohort="new"),
    }


def second_order(outputs: int = 3) -> dict[str, Algorithm]:
    def lbfgs(**options) -> fedge.FisherLBFGS:
        return fedge.FisherLBFGS(toy_model(outputs=outputs), epochs=2, batch_size=4, memory=2, **options)

    return {
        "lbfgs": lbfgs(),
        "lbfgs_next": lbfgs(curvature_at="next", weight_decay=0.01),
        "lbfgs_batch_square": lbfgs(matrix="batch_square"),
        "lbfgs_product": lbfgs(curvature="product", source="gradient", matrix="gauss_newton", damping=0.1),
        "lbfgs_decay": lbfgs(lr_decay=0.7),
        "lbfgs_clip": lbfgs(clip=0.4),
        "lbfgs_product_next": lbfgs(curvature="product", curvature_at="next", candidates=(0.5, 1.0)),
        "lbfgs_slopes": lbfgs(curvature="product", matrix="squared_slopes", dampings=(0.1, 1.0)),
        "lbfgs_precondition": lbfgs(direction="diagonal", damping=0.3),
        "subspace": fedge.SubspaceNewton(toy_model(outputs=outputs), epochs=2, batch_size=4),
        "subspace_fisher": fedge.SubspaceNewton(
            toy_model(outputs=outputs),
            epochs=2,
            batch_size=4,
            matrix="fisher",
            centre="start",
            memory=2,
            lr_decay=0.8,
            inner_decay=0.3,
            momentum=0.5,
            weight_decay=0.01,
        ),
        "giant": fedge.GIANT(toy_model(outputs=outputs), iterations=5, weight_decay=0.01, damping=0.2),
        "done": fedge.DONE(toy_model(outputs=outputs), alpha=0.1, batch_size=6, iterations=7, candidates=()),
        "lbfgs_batches": lbfgs(source="gradient", batches=2, lr=0.5, candidates=(0.25, 1.0), weight_decay=0.01),
    }


def algorithms() -> dict[str, Algorithm]:
    """Every algorithm in the forms that take different paths, on the toy problem; common tests run over all."""
    plain = {**first_order(), **second_order()}
    binary = {**first_order(2), **second_order(2)}
    names = (
        "fedavg",
        "fedavg_decay",
        "fedavg_clip",
        "fedavg_server_adam",
        "spectral_carried",
        "spectral_server",
        "shampoo_server",
        "fedcm",
        "fedprox",
        "foof",
        "fednova",
        "scaffold_counted",
        "feddane",
        "lbfgs",
        "lbfgs_product",
        "lbfgs_product_next",
        "lbfgs_slopes",
        "subspace",
        "giant",
        "done",
    )
    wrapped = {f"fedova_{name}": fedge.FedOVA(binary[name], classes=3, weighted="adam" in name) for name in names}
    wrapped["fedova_scaffold"] = wrapped.pop("fedova_scaffold_counted")
    wrapped["fedova_scaffold_weighted"] = fedge.FedOVA(binary["scaffold_weighted"], classes=3, weighted=True)
    wrapped["fedova_balanced"] = fedge.FedOVA(binary["fedavg"], classes=3, positive_weight=2.0)
    shared = {
        f"sharing_{name}": fedge.DataSharing(plain[name], beta=0.3)
        for name in ("fedavg", "scaffold", "feddane", "lbfgs", "subspace")
    }
    zhao = {"of": "all", "balanced": True, "portion": 0.5, "warm_up": 2}
    shared["sharing_balanced"] = fedge.DataSharing(plain["fedavg"], beta=0.1, **zhao)
    shared["sharing_fedova"] = fedge.DataSharing(wrapped["fedova_fedavg"], beta=0.3)
    means = {f"averaged_{name}": fedge.Averaged(plain[name], window=2) for name in ("fedavg", "fedper", "lbfgs")}
    means["averaged_fedova"] = fedge.Averaged(wrapped["fedova_fedavg"], window=2)
    means["fedova_averaged"] = fedge.FedOVA(fedge.Averaged(binary["fedavg"], window=2), classes=3)
    means["calibrated_fedova"] = fedge.Calibrated(means["averaged_fedova"], every=1, cohorts=2)
    means["calibrated_fedavg"] = fedge.Calibrated(plain["fedavg"], every=2)
    means["sharing_averaged"] = fedge.DataSharing(means["averaged_fedova"], beta=0.3)
    others = {**combined(plain, binary), **coded(plain, binary), **private(plain, binary)}
    return {**plain, **wrapped, **shared, **means, **others}


def combined(plain: dict[str, Algorithm], binary: dict[str, Algorithm]) -> dict[str, Algorithm]:
    rules = {
        "median": fedge.Median(),
        "trimmed": fedge.TrimmedMean(0.2),
        "krum": fedge.Krum(1, 2),
        "clipped": fedge.ClippedMean(0.3),
        "bounded": fedge.BoundedMean(),
        "gather": fedge.Gather(),
    }
    found = {f"robust_{name}": fedge.Robust(plain["fedavg"], rule) for name, rule in rules.items()}
    found["robust_scaffold"] = fedge.Robust(plain["scaffold_average"], fedge.BoundedMean())
    found["robust_lbfgs"] = fedge.Robust(plain["lbfgs_product_next"], fedge.Median())
    found["robust_fedova"] = fedge.Robust(fedge.FedOVA(binary["fedavg"], classes=3), fedge.TrimmedMean(0.2))
    found["fedova_robust"] = fedge.FedOVA(fedge.Robust(binary["feddane"], fedge.Krum(1, 2)), classes=3)
    found["fedova_bounded"] = fedge.FedOVA(fedge.Robust(binary["fedavg"], fedge.BoundedMean()), classes=3)
    found["fedova_clipped"] = fedge.FedOVA(fedge.Robust(binary["fedavg"], fedge.ClippedMean(0.3)), classes=3)
    return found


def private(plain: dict[str, Algorithm], binary: dict[str, Algorithm]) -> dict[str, Algorithm]:
    """For cohorts of 5 of 7 clients."""

    def noisy(inner: Algorithm, **options) -> Algorithm:
        return fedge.Private(inner, clip=0.5, noise=0.1, clients=7, expected=5, **options)

    return {
        "private_fedavg": noisy(plain["fedavg_server_momentum"]),
        "private_fedova": noisy(fedge.FedOVA(binary["fedavg"], classes=3), held=0.5),
        "private_feddane": noisy(plain["feddane"], on_client=True),
        "private_scaffold": noisy(plain["scaffold"]),
        "private_new_cohort": noisy(plain["feddane_new_cohort"]),
        "private_compressed": noisy(fedge.Compressed(wide(), fedge.TopK(0.2)), on_client=True),
    }


def wide(outputs: int = 3) -> Algorithm:
    """More than the 64 numbers below which nothing is encoded."""
    return fedge.FedAvg(fedge.models.mlp(6, (12,), outputs, seed=1).double(), lr=0.2, epochs=2, batch_size=4)


def coded(plain: dict[str, Algorithm], binary: dict[str, Algorithm]) -> dict[str, Algorithm]:
    codecs = {
        "quantise": fedge.Quantise(8),
        "two_bits": fedge.Quantise(2),
        "top": fedge.TopK(0.1),
        "cast": fedge.Cast(),
    }
    found = {f"compressed_{name}": fedge.Compressed(wide(), codec) for name, codec in codecs.items()}
    found["compressed_forgetful"] = fedge.Compressed(wide(), fedge.Quantise(4), feedback=False)
    found["compressed_fedova"] = fedge.Compressed(fedge.FedOVA(wide(2), classes=3), fedge.TopK(0.2))
    found["fedova_compressed"] = fedge.FedOVA(fedge.Compressed(wide(2), fedge.Quantise(4)), classes=3)
    found["robust_compressed"] = fedge.Robust(fedge.Compressed(wide(), fedge.TopK(0.2)), fedge.Median())
    return found


# `make test` runs these; `make test-all` runs every case. Each algorithm, wrapper, rule and codec is here once
# (tests/test_links.py checks that).
EACH_ONCE = {
    "fedavg_momentum", "fedavg_adam", "fedavg_server_adam", "spectral_carried", "fedcm", "fedprox", "fednova_decay",
    "scaffold_weighted", "fedper", "feddane_new_cohort", "feddane_clip", "lbfgs_next", "lbfgs_batches",
    "lbfgs_product_next", "lbfgs_slopes", "subspace_fisher", "fedova_subspace", "giant", "done", "foof_decay",
    "fedova_balanced", "fedova_scaffold", "fedova_lbfgs_product", "sharing_fedova",
    "sharing_averaged", "averaged_fedper", "robust_median", "robust_trimmed", "robust_krum", "robust_clipped",
    "robust_gather", "robust_lbfgs", "fedova_robust", "compressed_quantise", "compressed_top", "compressed_cast",
    "fedova_compressed", "robust_compressed", "private_fedova",
    "fedova_bounded", "shared_ova_inner", "calibrated_fedova",
}  # fmt: skip
# Each way through the engine once: a streaming and a stacked rule, rows, memory, a codec with feedback, several
# phases, a new cohort in the second, sharing, cohorts that may be empty, and these together.
EACH_PATH = {
    "fedavg_momentum", "scaffold_counted", "feddane_new_cohort", "lbfgs_product_next", "subspace_fisher",
    "fedova_robust", "fedova_compressed", "robust_compressed", "sharing_fedova", "private_fedova",
}  # fmt: skip


def cases(short: Collection[str], every: Iterable[str] | None = None) -> list[Any]:
    """Every name, by default of `algorithms`, to parametrise by; those outside `short` need the option --all-cases."""
    long, names = pytest.mark.all_cases, sorted(algorithms()) if every is None else list(every)
    assert set(short) <= set(names), f"no such case: {set(short) - set(names)}"
    return [pytest.param(name, marks=() if name in short else long) for name in names]
