"""A function's text with its operations beside the lines they stand on."""

from __future__ import annotations

from midstream.interleaving.source.copies import Template
from midstream.interleaving.source.operations import Site

_AROUND = 4
"""Lines shown before and after an operation."""


def list_operations(template: Template) -> str:
    """The whole function; a line with several operations is followed by a row for each."""
    return "\n".join(_rows(template, template.definition.lineno, _last_line(template)))


def list_around(template: Template, site: Site) -> str:
    """The lines around one operation, which an arrow points at."""
    first = max(template.definition.lineno, site.line - _AROUND)
    last = min(_last_line(template), site.line + _AROUND)
    rows = []
    for number in range(first, last + 1):
        mark = "-->" if number == site.line else "   "
        rows.append(f"{mark} {number:>5} {_text(template, number)}".rstrip())
    return "\n".join([f"{site.name}:", *rows])


def _rows(template: Template, first: int, last: int) -> list[str]:
    width = max((len(site.name) for site in template.sites), default=0)
    rows = []
    for number in range(first, last + 1):
        names = [site.name for site in template.sites if site.line == number]
        text = _text(template, number)
        rows.append(_row(names[0] if names else "", width, str(number), text))
        rows += [_row(name, width, "+", "") for name in names[1:]]
    return rows


def _row(name: str, width: int, place: str, text: str) -> str:
    arrow = "->" if name else "  "
    return f"{name:<{width}} {arrow} {place:>5} {text}".rstrip()


def _text(template: Template, number: int) -> str:
    return template.lines[number - 1].rstrip("\n")[template.definition.col_offset :]


def _last_line(template: Template) -> int:
    return template.definition.end_lineno or template.definition.lineno
