"""How many rounds, bytes and gradients a method needs to reach an accuracy: `python -m benchmarks.rounds`."""
