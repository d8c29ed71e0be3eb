"""Every algorithm on digits with two labels a client: `python -m benchmarks.algorithms`."""
