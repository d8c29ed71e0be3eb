"""The paper's Theorems 1 to 3 (Sec. V), measured: `python -m benchmarks.theory [convex|nonconvex|bytes]`."""
