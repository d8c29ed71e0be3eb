"""Data, a network, a metric and an algorithm of your own, for an experiment file: pumps.toml names them.

`python mine.py` writes pumps.csv anew: forty pumps, each row one recording of a vibration sensor.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import fedge
from fedge import Ask, Batch, Task, tree
from fedge.core import Flow, Model, Params, Payload

HERE = Path(__file__).parent
STATES = ("healthy", "worn", "cracked")
PUMPS, STEPS = 40, 16


def load(path: str = "pumps.csv", test_share: float = 0.25) -> fedge.Federation:
    """One client per pump: the CSV has the columns pump, state and the readings. A share of each is for testing."""
    with open(HERE / path, newline="") as file:
        rows = list(csv.DictReader(file))
    owner = np.array([row["pump"] for row in rows])
    y = np.array([STATES.index(row["state"]) for row in rows])
    x = np.array([[float(row[f"t{step}"]) for step in range(STEPS)] for row in rows])[:, :, None]  # [N, time, 1]
    test = np.arange(len(rows)) % round(1 / test_share) == 0
    data = fedge.data.from_arrays(x[~test], y[~test], x[test], y[test], names=STATES)
    return fedge.Federation(data, fedge.partition.by_group(owner[~test]))


class Net(nn.Module):
    """An LSTM over the readings; `outputs` is set from the data, `width` in the file."""

    def __init__(self, outputs: int, width: int = 12) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0].mean(dim=1))


def worst_recall(scores: Tensor, labels: Tensor) -> float:
    """The recall of the state that is recognised worst."""
    found = scores.argmax(1)
    return min(float((found[labels == one] == one).float().mean()) for one in labels.unique())


@dataclass(frozen=True, eq=False)
class Spring(fedge.Algorithm[dict[str, Any]]):
    """FedAvg in which a spring of strength mu holds every client to the model that it was sent (FedProx)."""

    model: nn.Module
    lr: float = 0.1
    mu: float = 0.1
    epochs: int = 1
    batch_size: int | None = 10
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


def write(path: Path, rows: int = 800) -> None:
    """Made-up recordings: wear makes a drift, a crack makes clicks, and every pump has its own speed."""
    rng = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["pump", "state", *(f"t{step}" for step in range(STEPS))])
        for _ in range(rows):
            pump, state = int(rng.integers(PUMPS)), int(rng.choice(3, p=[0.5, 0.3, 0.2]))
            turn = (0.6 + 0.05 * np.sin(pump)) * np.arange(STEPS)
            signal = 0.5 * np.sin(turn + rng.uniform(0, 6)) + 0.1 * rng.standard_normal(STEPS)
            signal += (state == 1) * np.linspace(-1, 1, STEPS) + 2.0 * (state == 2) * (rng.random(STEPS) < 0.2)
            out.writerow([f"pump-{pump}", STATES[state], *(f"{value:.2f}" for value in signal)])


if __name__ == "__main__":
    write(HERE / "pumps.csv")
