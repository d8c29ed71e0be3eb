"""matplotlib's SVG made fit to stand inside a page, next to others."""

from __future__ import annotations

import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure

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


def inline(document: str, prefix: str, title: str) -> str:
    """The <svg> element alone, its ids prefixed: ids of one page must be unique.

    `title` is an escaped attribute value, read aloud instead of the picture.
    """
    element = _SURPLUS.sub("", document).replace("xlink:href=", "href=").strip()
    element = _REFERENCE.sub(rf"\g<1>{prefix}-", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
