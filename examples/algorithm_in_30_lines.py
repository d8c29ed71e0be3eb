"""A complete algorithm in about 30 lines, beside FedAvg on clients that hold two of ten digits.

FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020) is FedAvg with a spring: a client
minimises F_k(w) + mu/2 |w - w_t|^2, so that it does not run far away from the others. Without the spring it must be
FedAvg, with it the model must travel less: both can be read off. Whether that helps depends on the problem:
here it does not. `docs/write-an-algorithm.md` explains the contract.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

import fedge
from fedge import Ask, Batch, Task, tree
from fedge.core import Flow, Model, Params, Payload


@dataclass(frozen=True, eq=False)
class FedProx(fedge.Algorithm[dict[str, Any]]):
    model: nn.Module
    lr: float = 0.1
    epochs: int = 5
    batch_size: int | None = 15
    mu: float = 0.1
    loss: Callable[[Tensor, Tensor], Tensor] = fedge.cross_entropy

    def tasks(self, model: Model) -> Mapping[str, Task]:
        def start(sent: Payload) -> Params:
            return sent["params"]

        def step(sent: Payload, params: Params, batch: Batch) -> Params:
            spring = tree.scale(self.mu, tree.sub(params, sent["params"]))
            return tree.axpy(-self.lr, tree.add(model.grad(params, batch), spring), params)

        def finish(sent: Payload, params: Params, examples: Tensor) -> tuple[Payload, Tensor]:
            return {"delta": tree.sub(params, sent["params"])}, examples.float()

        return {"train": Task(start, step, finish, self.epochs, self.batch_size)}

    def init(self, params: Params) -> dict[str, Any]:
        return {"params": params}

    def round(self, state: dict[str, Any]) -> Flow[dict[str, Any]]:
        trained = yield Ask("train", {"params": state["params"]})
        return {"params": tree.add(state["params"], trained.mean["delta"])}


def main() -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, clients=50, labels=2))
    model = fedge.models.mlp(seed=0)
    first = model.state_dict()
    prox = FedProx(model, lr=0.2, mu=0.5)
    algorithms = {"FedAvg": fedge.FedAvg(model, lr=0.2), "FedProx, mu = 0": replace(prox, mu=0.0), "FedProx": prox}
    print(f"{'algorithm':<18}{'accuracy':>10}{'distance from the start':>26}")
    for name, algorithm in algorithms.items():
        run = fedge.train(algorithm, federation, rounds=20, cohort=10, observe=fedge.Observe(evaluate_every=20))
        distance = float(tree.norm(tree.sub(run.params, first)))
        print(f"{name:<18}{100 * run.history[-1]['test_accuracy']:>8.1f} %{distance:>26.4f}")


if __name__ == "__main__":
    main()
