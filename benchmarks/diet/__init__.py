"""FedOVA with fewer bytes, beside FedAvg on the same diet: `python -m benchmarks.diet`."""
