"""Flower's PyTorch quickstart, ported: ten nodes, a small CNN, FedAvg with two local epochs.

There it is a ClientApp, a ServerApp and a pyproject.toml; `docs/from-flower.md` puts both side by side. The data are
the digits that come with fedge, where the original has CIFAR-10.
"""

import torch
from torch import Tensor, nn

import fedge


class Net(nn.Module):
    """task.py: nothing changes, it is the same nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 16, 3)
        self.fc1 = nn.Linear(16 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.relu(self.conv2(x))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def main() -> None:
    data = fedge.data.load("digits")  # load_data(): the whole set, not one partition
    nodes = fedge.partition.iid(data.train_y, clients=10)  # IidPartitioner(num_partitions=10)
    torch.manual_seed(0)
    # train() of the client and FedAvg of the server are one object: the loop over batches is what it is made of
    algorithm = fedge.FedAvg(Net(), lr=0.1, momentum=0.9, epochs=2, batch_size=32)
    run = fedge.train(
        algorithm,
        fedge.Federation(data, nodes),
        rounds=15,  # num-server-rounds
        cohort=5,  # fraction-train = 0.5
        on_round=lambda record: print(f"round {record['round']:>2}: {100 * record['test_accuracy']:.1f} %"),
    )
    print(f"{run.ledger.total()['up'] / 1e6:.2f} MB up; result.arrays is {len(run.module().state_dict())} tensors")


if __name__ == "__main__":
    main()
