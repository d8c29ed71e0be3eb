"""What can go wrong with a report."""

from __future__ import annotations


class ReportError(ValueError):
    """A run folder or an option that no report can be made of."""


class MissingExtra(ImportError):
    """An optional dependency that is not installed."""
