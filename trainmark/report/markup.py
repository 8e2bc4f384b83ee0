"""A few lines for building HTML and SVG in which nothing can be left unescaped or unclosed."""

from html import escape


class Markup(str):
    """Text that is HTML already; any other string is escaped when it becomes a child."""


_VOID = ("br", "input", "meta")

Child = str | int | float | None


def tag(name: str, /, *children: Child, **attributes: Child) -> Markup:
    """An element. `class_` gives `class`, `stroke_width` gives `stroke-width`; None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    # Every element is closed, so that the page is well-formed XML as well. The short form is for
    # HTML's void elements only: a browser reads `<td/>` as a cell that is never closed.
    if name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Children one after the other; None is left out."""
    return Markup("".join(_safe(child) for child in children if child is not None))


def _safe(child: Child) -> str:
    return child if isinstance(child, Markup) else escape(str(child))
