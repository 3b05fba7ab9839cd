"""A self-contained HTML page: one file, no script, no network, readable on a phone and on paper."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { --ink: #1b2430; --muted: #66717f; --line: #e4e8ee; --accent: #0f7b6c; --soft: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--soft); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 0 1rem 4rem; }
header { padding: 3rem 0 1.5rem; }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; letter-spacing: -.01em; margin: 0 0 .4rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.lead, .note { color: var(--muted); }
.lead { font-size: 1.05rem; }
.note { font-size: .87rem; }
section { background: #fff; border: 1px solid var(--line); border-radius: 14px; padding: 1.4rem; margin: 1.2rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 14px; padding: 1rem 1.1rem; }
.card b { display: block; font-size: 1.75rem; line-height: 1.2; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.card b.good { color: var(--accent); }
.card span { display: block; font-size: .9rem; }
.card small { display: block; color: var(--muted); font-size: .8rem; }
figure { margin: 1rem 0; max-width: 46rem; }
figure img { display: block; width: 100%; height: auto; border-radius: 8px; }
figcaption { color: var(--muted); font-size: .87rem; margin-top: .4rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .8rem; margin: 1rem 0; }
.pictures.narrow { grid-template-columns: repeat(auto-fill, minmax(5rem, 1fr)); }
.pictures figure { margin: 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--muted); font-weight: 600; white-space: nowrap; }
th, td { padding: .42rem .8rem .42rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.good { color: var(--accent); font-weight: 600; }
td.bad { color: #b3402e; font-weight: 600; }
details > summary { cursor: pointer; color: var(--accent); font-weight: 600; margin: .6rem 0; }
code { background: var(--soft); border-radius: 4px; padding: .1em .35em; font-size: .88em; overflow-wrap: anywhere; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Cell:
    """A table cell with a CSS class: ``good`` or ``bad``."""

    text: str
    css: str = ""


class Page:
    """Collects blocks in order. All text is escaped; ``note`` and ``text`` take plain text."""

    def __init__(self, title: str, lead: str) -> None:
        self.title = title
        self._blocks = [f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>']
        self._open = False

    def cards(self, cards: Sequence[tuple[str | Cell, str, str]]) -> None:
        """Key figures: value (a ``Cell`` that is not good is shown without colour), what it is, a detail."""
        self._end_section()
        inner = ""
        for value, name, detail in cards:
            cell = value if isinstance(value, Cell) else Cell(value, "good")
            number = f'<b class="{cell.css}">{escape(cell.text)}</b>'
            inner += f'<div class="card">{number}<span>{escape(name)}</span><small>{escape(detail)}</small></div>'
        self._blocks.append(f'<div class="cards">{inner}</div>')

    def section(self, title: str, text: str = "") -> None:
        self._end_section()
        self._blocks.append(f"<section><h2>{escape(title)}</h2>")
        self._open = True
        if text:
            self.text(text)

    def heading(self, title: str) -> None:
        self._blocks.append(f"<h3>{escape(title)}</h3>")

    def text(self, text: str) -> None:
        self._blocks.append(f"<p>{escape(text)}</p>")

    def note(self, text: str) -> None:
        self._blocks.append(f'<p class="note">{escape(text)}</p>')

    def svg(self, drawing: str, alt: str, caption: str = "") -> None:
        self.image(drawing.encode(), "svg+xml", alt, caption)

    def image(self, data: bytes, kind: str, alt: str, caption: str = "") -> None:
        """``kind`` is png or svg+xml. As an image of its own, a drawing's identifiers cannot clash with another's."""
        source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._blocks.append(f'<figure><img src="{source}" alt="{escape(alt)}" loading="lazy">{below}</figure>')

    def pictures(self, pictures: Sequence[tuple[bytes, str]], *, narrow: bool = False) -> None:
        """PNGs with captions side by side, as many in a row as fit."""
        inner = "".join(
            f'<figure><img src="data:image/png;base64,{base64.b64encode(data).decode()}" alt="{escape(caption)}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for data, caption in pictures
        )
        self._blocks.append(f'<div class="pictures{" narrow" if narrow else ""}">{inner}</div>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str | Cell]], numbers: Sequence[int] = ()) -> None:
        """``numbers``: indices of the columns that are set flush right."""

        def line(tag: str, cells: Sequence[str | Cell]) -> str:
            parts = []
            for index, given in enumerate(cells):
                cell = given if isinstance(given, Cell) else Cell(given)
                css = " ".join(filter(None, ("number" if index in numbers else "", cell.css)))
                parts.append(f'<{tag} class="{css}">{escape(cell.text)}</{tag}>')
            return f"<tr>{''.join(parts)}</tr>"

        head, body = line("th", columns), "".join(line("td", row) for row in rows)
        self._blocks.append(f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>')

    def fold(self, summary: str) -> Fold:
        """``with page.fold("All rows"):`` hides the blocks inside until the reader asks."""
        return Fold(self, summary)

    def html(self) -> str:
        self._end_section()
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n"
            "<body><main>" + "\n".join(self._blocks) + "</main></body></html>\n"
        )

    def _end_section(self) -> None:
        if self._open:
            self._blocks.append("</section>")
            self._open = False


class Fold:
    def __init__(self, page: Page, summary: str) -> None:
        self.page, self.summary = page, summary

    def __enter__(self) -> None:
        self.page._blocks.append(f"<details><summary>{escape(self.summary)}</summary>")

    def __exit__(self, *_: object) -> None:
        self.page._blocks.append("</details>")


def environment_table(page: Page, environment: dict[str, object]) -> None:
    known = {name.replace("_", " "): str(value) for name, value in environment.items() if value is not None}
    page.table(("what", "value"), list(known.items()))
