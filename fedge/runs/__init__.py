"""What training leaves: the run, its folder, its checkpoints."""
