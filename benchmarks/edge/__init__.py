"""Seconds and joules to an accuracy on three fleets, and what asynchronous training saves: tables of docs/edge.md."""
