"""Examples of several inputs: a picture and a few numbers, by name.

Thirty clinics each keep small scans and, of every patient, age and two laboratory values. A dict of arrays is one set
of inputs; the model's `forward` gets them by name. Neither input is enough: the scan shows whether there is a spot, the
numbers say whether it matters.
"""

import numpy as np
import torch
from torch import Tensor, nn

import fedge


def patients(count: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Scans [N, 1, 8, 8] and values [N, 3]; 0 healthy, 1 harmless, 2 to be treated."""
    spot, marker = rng.random(count) < 0.6, rng.standard_normal(count)
    scan = 0.3 * rng.standard_normal((count, 1, 8, 8))
    for one in np.flatnonzero(spot):
        row, column = rng.integers(6, size=2)
        scan[one, 0, row : row + 3, column : column + 3] += 1.0
    values = np.stack([rng.standard_normal(count), marker, marker + rng.standard_normal(count)], 1)
    return {"scan": scan, "values": values}, np.where(spot, np.where(marker > 0, 2, 1), 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 16))
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(16 + 3, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, scan: Tensor, values: Tensor) -> Tensor:
        return self.out(torch.cat([self.look(scan), values], dim=1))


def main() -> None:
    rng = np.random.default_rng(0)
    (train_x, train_y), (test_x, test_y) = patients(1800, rng), patients(400, rng)
    data = fedge.data.from_arrays(train_x, train_y, test_x, test_y, names=("healthy", "harmless", "treat"))
    federation = fedge.Federation(data, fedge.partition.dirichlet(data.train_y, clients=30, alpha=1.0, seed=0))
    print(data)

    torch.manual_seed(0)
    algorithm = fedge.FedAvg(Net(), lr=0.1, epochs=2, batch_size=10)
    run = fedge.train(algorithm, federation, rounds=12, cohort=10, metrics=["f1"], observe=fedge.Observe(4))
    for record in run.history[3::4]:
        print(f"round {record['round']:2}: {100 * record['test_accuracy']:.1f} % right, F1 {record['test_f1']:.2f}")
    without = {"scan": data.test_x["scan"], "values": torch.zeros_like(data.test_x["values"])}
    right = (run.predict(without) == data.test_y).float().mean()
    print(f"without the values: {100 * float(right):.1f} % right")


if __name__ == "__main__":
    main()
