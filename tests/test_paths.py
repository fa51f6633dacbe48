"""Paths of this machine are taken out of what is shared, and nothing else is changed by that."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from helpers.paths import scrub, scrub_message
from helpers.reports import _scrub_texts


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("read /data/kimi/config.json", "read kimi/config.json"),
        ("in /data", "in data"),
        ("'/data/a' and \"/data/b\"", "'a' and \"b\""),
        (r"print('\n/data/a')", r"print('\na')"),
        ("<table></data></table>", "<table></data></table>"),
        ("/database/x", "/database/x"),
        ("file:///data/a", "file://a"),
    ],
)
def test_a_folder_is_taken_out_wherever_it_stands_but_in_a_tag(text: str, left: str) -> None:
    assert scrub(text, [Path("/data/kimi")]) == left


@pytest.mark.parametrize("folder", ["/t", "/td", "/table", "/d", "/p"])
def test_a_short_folder_changes_no_tag(folder: str) -> None:
    page = f"<p><table><tr><td>{folder}/kimi</td></tr></table><br/></p>"
    assert scrub(page, [Path(folder) / "kimi"]) == "<p><table><tr><td>kimi</td></tr></table><br/></p>"


def test_every_text_of_a_notebook_is_scrubbed_and_no_picture() -> None:
    output = nbformat.v4.new_output(
        "display_data", {"image/png": "AB/t/CD", "text/html": "<b>/t/x</b>"}, metadata={"image/png": {"alt": "/t/x"}}
    )
    cell = nbformat.v4.new_code_cell("open('/t/x')", outputs=[output])
    scrubbed = _scrub_texts(nbformat.v4.new_notebook(cells=[cell]), [Path("/t/kimi")])
    assert scrubbed["cells"][0]["source"] == "open('x')"
    (shown,) = scrubbed["cells"][0]["outputs"]
    assert shown["data"] == {"image/png": "AB/t/CD", "text/html": "<b>x</b>"}
    assert shown["metadata"] == {"image/png": {"alt": "x"}}


def test_a_message_keeps_the_last_part_of_any_path() -> None:
    assert scrub_message("no space left: /somewhere/else/scores.csv") == "no space left: scores.csv"
