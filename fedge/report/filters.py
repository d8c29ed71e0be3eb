"""Filters of the page: a box per value of a field, and the styles that hide what is not chosen. No script is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fedge.report.groups import Group
from fedge.report.style import PALETTE, looks

MOST_VALUES = 12  # of a field that has a filter
FEWEST = 4  # groups from which filters are of use


class Filters:
    """Which group has which class; classes are numbers, so nothing from a file becomes part of a style."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        values: dict[str, list[str]] = {}
        for group in groups:
            for field, value in group.fields.items():
                if value not in values.setdefault(field, []):
                    values[field].append(value)
        few = len(groups) < FEWEST
        self.values = {} if few else {name: found for name, found in values.items() if len(found) <= MOST_VALUES}

    def classes(self) -> list[str]:
        """The classes of each group: itself, its colour, its values."""
        found = []
        for at, (group, look) in enumerate(zip(self.groups, looks(self.groups), strict=True)):
            words = ["group", f"g{at}"]
            words += [f"c{PALETTE.index(look.colour)}"] if look.coloured else []
            words += [
                f"f{number}v{known.index(group.fields[field])}"
                for number, (field, known) in enumerate(self.values.items())
                if field in group.fields
            ]
            found.append(" ".join(words))
        return found

    def html(self) -> str:
        """The boxes, all of them ticked."""
        if not self.values:
            return ""
        sets = "\n".join(self._field(number, field) for number, field in enumerate(self.values))
        return f'<div class="filters">\n{sets}\n</div>'

    def _field(self, number: int, field: str) -> str:
        boxes = "\n".join(
            f'<label><input type="checkbox" id="f{number}v{at}" autocomplete="off" checked> {escape(value)}</label>'
            for at, value in enumerate(self.values[field])
        )
        return f"<fieldset>\n<legend>{escape(field)}</legend>\n{boxes}\n</fieldset>"

    def css(self) -> str:
        """Hide what is not ticked; show which line a row of the table belongs to."""
        return "\n".join([*self._hide(), *self._point_out()])

    def _hide(self) -> Iterator[str]:
        for number, known in enumerate(self.values.values()):
            for at in range(len(known)):
                yield f"main:has(#f{number}v{at}:not(:checked)) .f{number}v{at} {{ display: none; }}"

    def _point_out(self) -> Iterator[str]:
        for at in range(len(self.groups)):
            yield f"main:has(tr.g{at}:hover) svg .group:not(.g{at}) {{ opacity: .12; }}"
            yield f"main:has(tr.g{at}:hover) svg .g{at} path {{ stroke-width: 2.4; }}"
