"""Steps recorded once and replayed: as a list of operations on a CPU, as a CUDA graph on a GPU."""
