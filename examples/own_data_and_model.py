"""Your own arrays, your own clients, your own network.

Thirty pumps each keep the recordings of their vibration sensor and together learn to tell a healthy bearing from a worn
one and a cracked one. The data are numpy arrays, the clients are a list of index arrays (one per pump), and the model
is any nn.Module without running statistics: this one looks at short windows, and has LayerNorm and dropout.
"""

import numpy as np
import torch
from torch import nn

import fedge

STATES = ("healthy", "worn", "cracked")
PUMPS, LENGTH, WINDOW = 30, 64, 9


def record(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals [count, LENGTH], the state of each, and the pump that it comes from."""
    pump = rng.integers(PUMPS, size=count)
    state = rng.choice(len(STATES), size=count, p=[0.5, 0.3, 0.2])
    time = np.arange(LENGTH)
    speed = 0.30 + 0.02 * np.sin(pump)  # every pump turns at its own speed
    signal = np.sin(speed[:, None] * time + rng.uniform(0, 2 * np.pi, size=(count, 1)))
    signal += 0.5 * (state == 1)[:, None] * np.sin(4 * speed[:, None] * time)  # wear: an overtone
    signal += 2.0 * (state == 2)[:, None] * (rng.random((count, LENGTH)) < 0.05)  # a crack: clicks
    signal += 0.2 * rng.standard_normal((count, LENGTH))
    return signal, state, pump


class Net(nn.Module):
    """The same layer on every window of a signal, and the strongest answers; LayerNorm in the place of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Linear(WINDOW, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(16, len(STATES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.unfold(1, WINDOW, 3)  # [B, windows, WINDOW]
        features = torch.relu(self.norm(self.window(windows))).amax(dim=1)
        return self.out(self.drop(features))


def main() -> None:
    rng = np.random.default_rng(0)
    (train_x, train_y, pump), (test_x, test_y, _) = record(900, rng), record(300, rng)
    data = fedge.data.from_arrays(train_x, train_y, test_x, test_y, names=STATES)
    federation = fedge.Federation(data, [np.flatnonzero(pump == one) for one in range(PUMPS)])
    print(data)
    print(federation)

    torch.manual_seed(0)  # the only thing torch's own generator decides: the first weights
    algorithm = fedge.FedAvg(Net(), lr=0.3, epochs=1, batch_size=10)
    run = fedge.train(algorithm, federation, rounds=15, cohort=10, observe=fedge.Observe(evaluate_every=5))

    for row in run.history[4::5]:
        print(f"round {row['round']:2}: {100 * row['test_accuracy']:.1f} % of the test set right")
    for name, share in zip(STATES, run.history[-1]["test_class_accuracy"], strict=True):
        print(f"  {name}: {100 * share:.0f} %")
    print(f"moved {run.ledger.total()['up'] / 1e6:.2f} MB up and {run.ledger.total()['down'] / 1e6:.2f} MB down")
    guess = STATES[int(run.predict(data.test_x[:1])[0])]
    print(f"the first test recording is {STATES[test_y[0]]}, the model says {guess}")


if __name__ == "__main__":
    main()
