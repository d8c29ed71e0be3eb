"""Accuracy against epsilon: docs/privacy.md is made from these results."""
