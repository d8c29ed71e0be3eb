"""The parts of README.md that are made from stored results, each between two marks."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def with_part(name: str, body: str) -> str:
    """README.md with this between the marks of that name."""
    begin, end = f"<!-- {name}: python -m benchmarks.{name} -->\n", f"<!-- /{name} -->\n"
    text = README.read_text("utf-8")
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"README.md has no part {begin.strip()} ... {end.strip()}: put the two lines back")
    return before + begin + body + end + after
