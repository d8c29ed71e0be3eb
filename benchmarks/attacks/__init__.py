"""What attacks cost and what defences are worth: docs/attacks.md is made from results of `fedge attack`."""
