"""What notebooks show: figures with a description, tables with a caption, and sentences made from the data."""

from __future__ import annotations

import html
import io
import re

import matplotlib.pyplot as plt
import pandas as pd
import PIL.Image
from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure

from helpers.files import write_bytes
from helpers.runs import Run

# what stands in a column of numbers: a number with an optional unit or share, or a word for none
NUMBER = r"–|not reported|[-+]?[\d,.]+%?( \([\d.]+%\)| \[[-+\d.]+, [-+\d.]+\])?"


def say(sentence: str) -> None:
    """Show a sentence (Markdown) that was computed from the data."""
    display(Markdown(sentence))


def plain(text: str) -> str:
    """Return ``text`` so that Markdown and HTML show it as it is: names of files are not ours."""
    return html.escape(re.sub(r"([\\`*_{}\[\]()#+.!|~$-])", r"\\\1", text))


def show_figure(run: Run, name: str, figure: Figure, alt: str) -> None:
    """Save ``figure`` as ``figures/<name>.png`` and ``.svg`` of the run, and show it, ``alt`` in words."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    write_bytes(run.path(f"figures/{name}.svg"), svg.getvalue())
    png = png_of(figure)
    write_bytes(run.path(f"figures/{name}.png"), png)
    show_image(png, alt)


def png_of(figure: Figure) -> bytes:
    """Draw ``figure`` as a small PNG, the same bytes for the same figure, and close it."""
    png, small_png = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    plt.close(figure)
    # 256 colours are all that a figure of ours has, at a third of the size: reports are mailed
    PIL.Image.open(png).convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(small_png, "PNG", optimize=True)
    return small_png.getvalue()


def show_image(png: bytes, alt: str) -> None:
    """Show a picture, ``alt`` in words."""
    display(Image(png, format="png", alt=alt))


def show_table(table: pd.DataFrame, caption: str) -> None:
    """Show ``table`` without its index, under a caption; every cell is escaped, columns of numbers stand right."""
    numeric = [all(re.fullmatch(NUMBER, _text(value)) for value in table[column]) for column in table.columns]
    head = "".join(_cell('th scope="col"', column, right) for column, right in zip(table.columns, numeric, strict=True))
    rows = (
        "".join(_cell("td", value, right) for value, right in zip(values, numeric, strict=True))
        for values in table.itertuples(index=False)
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    display(
        HTML(
            f'<div class="table" tabindex="0"><table><caption>{html.escape(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
    )


def _cell(tag: str, value: object, right: bool) -> str:
    align = "right" if right else "left"  # also in JupyterLab, which has no style sheet of ours
    return f'<{tag} style="text-align: {align}">{html.escape(_text(value))}</{tag.split()[0]}>'


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
