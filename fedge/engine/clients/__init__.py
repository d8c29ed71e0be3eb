"""A client's side of the work: its examples, its batches, its tasks, and what it holds."""
