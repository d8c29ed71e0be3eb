"""matplotlib's SVG made fit to stand inside a page, next to others."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from fedge.report.style import PALETTE

DPI = 200
# What a page must not repeat (XML prologue, namespaces) and what nobody needs (metadata, comments).
_SURPLUS = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->|\sxmlns(:\w+)?=\"[^\"]*\"",
    re.DOTALL,
)
_REFERENCE = re.compile(r"(\bid=\"|href=\"#|url\(#)")


def render(figure: Figure) -> str:
    """The figure as an SVG document; text as outlines, so that it needs no font.

    The fixed salt and the missing date make equal figures equal files.
    """
    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "fedge", "svg.fonttype": "path"}):
        figure.savefig(stream, format="svg", dpi=DPI, metadata={"Date": None})
    return stream.getvalue()


def alone(document: str) -> str:
    """As a file by itself: without the marks that a page finds groups by."""
    return _GROUP.sub("<g>", document)


# Colours of figures that a page chooses by itself, so that they suit light and dark; the names are in template.html.
COLOURS = {
    "#000000": "--ink",
    "#ffffff": "--paper",
    "#e6e6e6": "--grid",
    "#999999": "--axis",
    "#b8bec6": "--plain",
    "#595959": "--soft",
    "#737373": "--axis",
    "#4d4d4d": "--soft",
    "#e0e0e0": "--grid",
} | {one.lower(): f"--line{at}" for at, one in enumerate(PALETTE) if one != "#000000"}
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_GROUP = re.compile(r'<g id="group(\d+)">')


def inline(document: str, prefix: str, title: str, groups: Sequence[tuple[str, str]] = ()) -> str:
    """The <svg> element alone, its ids prefixed: ids of one page must be unique.

    `title` is an escaped attribute value, read aloud instead of the picture. `groups` are, for what is drawn as
    group 0, 1, ..., its classes and its escaped name.
    """

    def marked(found: re.Match[str]) -> str:
        classes, name = groups[int(found[1])] if int(found[1]) < len(groups) else ("", "")
        return f'<g class="{classes}"><title>{name}</title>'

    element = _SURPLUS.sub("", document).replace("xlink:href=", "href=").strip()
    element = _GROUP.sub(marked, element)
    element = _REFERENCE.sub(rf"\g<1>{prefix}-", element)
    element = _COLOUR.sub(lambda found: _chosen(found[0]), element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _chosen(colour: str) -> str:
    name = COLOURS.get(colour.lower())
    return colour if name is None else f"var({name})"
