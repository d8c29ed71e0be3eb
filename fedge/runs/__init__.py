"""What training leaves: the run, its folder, its checkpoints."""

from fedge import atomic, regular

__all__ = ["atomic", "regular"]
