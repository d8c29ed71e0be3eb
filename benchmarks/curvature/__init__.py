"""Which curvature acts: Newton-type methods and their controls on digits: `python -m benchmarks.curvature`."""
