"""A regression from a CSV file with an owner column.

Twenty-five flats each keep the readings of their heating, and together learn to predict what it uses per day. The file
is written first, so that the example is complete; `owner` names the clients in every record and table. The targets are
floating-point numbers, so the loss is the squared error and the records have mse, mae and r2.
"""

import csv
import tempfile
from pathlib import Path

import numpy as np

import fedge

COLUMNS = ("outside", "inside", "people", "wind")


def write(path: Path, rows: int = 1500) -> None:
    """Made-up readings; every flat is insulated in its own way."""
    rng = np.random.default_rng(0)
    flat = rng.integers(25, size=rows)
    x = rng.standard_normal((rows, len(COLUMNS)))
    use = 12 - 3.0 * x[:, 0] + 2.0 * x[:, 1] + (0.5 + 0.04 * flat) * x[:, 3] + 0.3 * rng.standard_normal(rows)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["owner", *COLUMNS, "kwh"])
        out.writerows(
            [f"flat-{who:02}", *map("{:.3f}".format, row), f"{y:.3f}"] for who, row, y in zip(flat, x, use, strict=True)
        )


def read(path: Path) -> fedge.Federation:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    owner = np.array([row["owner"] for row in rows])
    x = np.array([[float(row[name]) for name in COLUMNS] for row in rows])
    y = np.array([float(row["kwh"]) for row in rows])
    test = np.arange(len(rows)) % 5 == 0
    data = fedge.data.from_arrays(x[~test], y[~test], x[test], y[test])
    by_group = fedge.partition.by_group
    return fedge.Federation(data, by_group(owner[~test]), test=by_group(owner[test]))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "heating.csv")
        federation = read(Path(folder) / "heating.csv")
    algorithm = fedge.FedAvg(fedge.models.mlp(len(COLUMNS), (16,), 1, seed=0), lr=0.02, epochs=2)
    run = fedge.train(
        algorithm, federation, rounds=20, cohort=10, metrics=["rmse"], observe=fedge.Observe(5, per_client=True)
    )
    for record in run.history[4::5]:
        print(f"round {record['round']:2}: off by {record['test_rmse']:.2f} kWh, R2 {record['test_r2']:.3f}")
    worst = max(fedge.by_client(run, federation), key=lambda row: row["mae"])
    print(f"worst served: {worst['client']}, off by {worst['mae']:.2f} kWh on {worst['examples']} days")
    print(f"the worst tenth of the flats: {run.history[-1]['test_client_mae_worst_decile']:.2f} kWh")
    print("the first days:", [round(float(one), 1) for one in run.predict(federation.data.test_x[:3]).flatten()])


if __name__ == "__main__":
    main()
