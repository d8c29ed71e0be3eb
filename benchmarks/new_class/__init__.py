"""A class that appears during training: `python -m benchmarks.new_class`."""
