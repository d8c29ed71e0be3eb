"""FedLab's standalone FedAvg, ported: a hundred clients, a tenth of them per round, an MLP.

There it is a PartitionedMNIST, an SGDSerialClientTrainer, a SyncServerHandler and a StandalonePipeline;
`docs/from-fedlab.md` puts both side by side. Another algorithm, there a handler and a trainer of your own, is one word.
"""

import fedge


def main() -> None:
    data = fedge.data.load("digits")
    # PartitionedMNIST(num_clients=100, partition="noniid-labeldir", dir_alpha=0.3)
    clients = fedge.partition.dirichlet(data.train_y, clients=100, alpha=0.3, seed=0)
    federation = fedge.Federation(data, clients)
    print(federation)
    settings = {"lr": 0.1, "epochs": 5, "batch_size": 10}  # trainer.setup_optim(epochs, batch_size, lr)
    model = fedge.models.mlp(64, (200, 200), 10, seed=0)  # MLP(64, 10)
    for algorithm in (fedge.FedAvg(model, **settings), fedge.SCAFFOLD(model, clients=100, **settings)):
        run = fedge.train(
            algorithm,
            federation,
            rounds=20,  # SyncServerHandler(global_round=20)
            cohort=10,  # sample_ratio=0.1
            observe=fedge.Observe(evaluate_every=20),
        )
        print(f"{type(algorithm).__name__:<10}{100 * run.history[-1]['test_accuracy']:.1f} %")


if __name__ == "__main__":
    main()
