"""What notebooks show: figures with a description, tables with a caption, and sentences made from the data."""

from __future__ import annotations

import html
import io

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure

from helpers.files import write_bytes
from helpers.runs import Run


def say(sentence: str) -> None:
    """Show a sentence (Markdown) that was computed from the data."""
    display(Markdown(sentence))


def show_figure(run: Run, name: str, figure: Figure, alt: str) -> None:
    """Save ``figure`` as ``figures/<name>.png`` and ``.svg`` of the run, and show it with ``alt`` for who can't see it."""
    for kind, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        write_bytes(run.path(f"figures/{name}.{kind}"), buffer.getvalue())
    plt.close(figure)
    display(Image(buffer.getvalue(), format="png", alt=alt))


def show_table(table: pd.DataFrame, caption: str) -> None:
    """Show ``table`` without its index, under a caption; every cell is escaped, numbers stand right."""
    columns = "".join(f'<th scope="col">{html.escape(str(column))}</th>' for column in table.columns)
    rows = []
    for values in table.itertuples(index=False):
        cells = "".join(f"<td{_alignment(value)}>{html.escape(_text(value))}</td>" for value in values)
        rows.append(f"<tr>{cells}</tr>")
    display(
        HTML(
            f'<div class="table"><table><caption>{html.escape(caption)}</caption><thead><tr>{columns}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )
    )


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _alignment(value: object) -> str:
    numeric = str(value).replace(",", "").replace(".", "").replace("-", "").replace(" %", "").isdigit()
    return ' style="text-align: right"' if numeric else ""
