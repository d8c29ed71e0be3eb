"""Every algorithm on digits with two labels per client: `python -m benchmarks.algorithms`."""
