"""Why a step cannot be recorded or stacked, in words about the model."""

from __future__ import annotations

VALUES_DECIDE = ("data-dependent", "tracing tensor", "calling .item()", "dynamic shape")  # in torch's errors


def reason(error: Exception) -> str:
    """One line; where values decide, torch's own words are about torch."""
    line = str(error).strip().partition("\n")[0]
    if any(words in line for words in VALUES_DECIDE):
        line = "the model does what depends on values (an `if` on a tensor, .item(), a mask as index): use torch.where"
    return f"{type(error).__name__}: {line}"
