"""Three algorithms on clients that hold two of ten digits: how well they learn, and what they cost in bytes.

FedAvg averages one network with ten outputs. FedOVA trains ten binary networks, each on the clients that hold its
digit. It does not care what trains them: here it is FedAvg first, and then FedAvg with a spectral step at the server.
"""

import fedge


def main() -> None:
    data = fedge.data.load("digits")
    federation = fedge.Federation(data, fedge.partition.labels_per_client(data.train_y, clients=50, labels=2))
    ten, two = fedge.models.mlp(outputs=10, seed=0), fedge.models.mlp(outputs=2, seed=0)
    spectral = fedge.FedAvg(two, lr=0.2, epochs=5, server_optimiser="spectral", server_momentum=0.5, server_lr=4.0)
    algorithms = {
        "FedAvg": fedge.FedAvg(ten, lr=0.5, epochs=5),
        "FedOVA": fedge.FedOVA(fedge.FedAvg(two, lr=0.2, epochs=5)),
        "FedOVA + spectral": fedge.FedOVA(spectral),
    }
    print(f"{federation}\n")
    print(f"{'algorithm':<20}{'accuracy':>10}{'MB up':>8}{'MB down':>9}")
    for name, algorithm in algorithms.items():
        run = fedge.train(algorithm, federation, rounds=20, cohort=10, observe=fedge.Observe(evaluate_every=20))
        accuracy, moved = run.history[-1]["test_accuracy"], run.ledger.total()
        print(f"{name:<20}{100 * accuracy:>8.1f} %{moved['up'] / 1e6:>8.2f}{moved['down'] / 1e6:>9.2f}")


if __name__ == "__main__":
    main()
