"""The parts of pages that are made from stored results, each between two marks."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def with_part(name: str, body: str) -> str:
    """README.md with this between the marks of that name."""
    return replaced(README.read_text("utf-8"), name, body, f"python -m benchmarks.{name}", README.name)


def replaced(text: str, name: str, body: str, command: str, page: str) -> str:
    """A page's text with this between the marks of that name; `command` is what makes it."""
    begin, end = f"<!-- {name}: {command} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no part {begin.strip()} ... {end.strip()}: put the two lines back")
    return before + begin + body + end + after
