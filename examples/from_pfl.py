"""The federated averaging of pfl-research's introduction, ported: users with few examples, a central optimiser.

There it is an ArtificialFederatedDataset, a PyTorchModel with two optimisers, a SimulatedBackend, three classes of
parameters and a CentralEvaluationCallback; `docs/from-pfl.md` puts both side by side.
"""

import fedge


def main() -> None:
    data = fedge.data.load("digits")
    # ArtificialFederatedDataset with user sizes that differ: who holds what is fixed before training
    users = fedge.partition.quantity_skew(data.train_y, clients=100, alpha=5.0, seed=0)
    algorithm = fedge.FedAvg(
        fedge.models.mlp(seed=0),
        lr=0.1,  # local_learning_rate
        epochs=5,  # local_num_epochs
        batch_size=None,  # local_batch_size=None: all examples of a user in one batch
        clip=1.0,  # local_max_grad_norm
        server_optimiser="adam",  # central_optimizer
        server_lr=0.02,
    )
    run = fedge.train(
        algorithm,
        fedge.Federation(data, users),
        rounds=60,  # central_num_iterations
        cohort=20,  # train_cohort_size
        observe=fedge.Observe(evaluate_every=20),  # CentralEvaluationCallback(central_data, ..., frequency=20)
    )
    for record in run.history[19::20]:
        accuracy, loss = 100 * record["test_accuracy"], record["test_loss"]
        print(f"iteration {record['round']}: accuracy {accuracy:.1f} %, loss {loss:.3f}")


if __name__ == "__main__":
    main()
