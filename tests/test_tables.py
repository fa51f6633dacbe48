"""Tables as files: whatever text a token has, and whatever float a score is, comes back as it was."""

from __future__ import annotations

import csv
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import notebook
from helpers.errors import InputError
from helpers.parameters import Parameters
from helpers.runs import Run
from helpers.tables import eviction_table, heavy_hitters, highest_scores, quoted, read_scores, score_table, write_csv

# every character but surrogates, which are no text on their own and which no tokenizer gives
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
AWKWARD = [
    "", " ", " a", "a ", "\n", "\r", "\r\n", "a\rb", "\n\n", '"', '""', '"a', "a,b", ",", "'", "NA", "NaN", "nan",
    "null", "NULL", "None", "N/A", "#N/A", "True", "1", "1.0", "-0", "007", "1e5", "\\", "\\n", "\t", "\ufeff",
    "\u2028", "\x1a", "\x00", "a\x00b", "<script>", "=1+1", "#", "é", "𝒳", "\ufffd",
]  # fmt: skip
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    started = Run(tmp_path_factory.mktemp("tables") / "run")
    started.begin(Parameters(), [])
    return started


def table_of(score: Any, null: Any, tokens: list[str] | None) -> pd.DataFrame:
    """``scores.csv`` of some capture, with these numbers in it."""
    names = ("mass", "mass_window", "mass_last", "mass_decayed")
    table = score_table({name: torch.rand(2, len(score)) for name in names}, tokens)
    return table.assign(attention_score=score, null_score=null)


def bits(values: Any) -> list[bytes]:
    """Every float as its eight bytes: -0.0 is not 0.0, and no digit is lost."""
    return [struct.pack("<d", value) for value in values]


@given(st.lists(st.tuples(TEXTS | st.sampled_from(AWKWARD), FLOATS, FLOATS), min_size=1, max_size=8))
@example([(token, 0.1 + 0.2, -0.0) for token in AWKWARD])
def test_tokens_and_scores_survive_writing_and_reading(run: Run, rows: list[tuple[str, float, float]]) -> None:
    tokens, score, null = (list(column) for column in zip(*rows, strict=True))
    write_csv(run, "scores.csv", table_of(np.array(score), np.array(null), tokens))
    back = read_scores(run.folder / "scores.csv", len(rows))
    assert list(back["token"]) == tokens
    assert bits(back["attention_score"]) == bits(score)
    assert bits(back["null_score"]) == bits(null)
    assert list(back["token_idx"]) == list(range(len(rows)))


@given(st.lists(TEXTS | st.sampled_from(AWKWARD), min_size=1, max_size=8))
@example(AWKWARD)
def test_other_programs_read_the_same_tokens(run: Run, tokens: list[str]) -> None:
    """Python's csv module knows nothing of how the file was written."""
    ones = np.ones(len(tokens))
    write_csv(run, "scores.csv", table_of(ones, ones, tokens))
    with (run.folder / "scores.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:5] == ["token_idx", "token", "attention_score", "visible_queries", "null_score"]
    assert header[5:] == ["mean", "calibrated", "window", "last", "decayed"]
    assert [row[1] for row in rows] == tokens


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "".join(text.splitlines(keepends=True)[:-1]),
        lambda text: "".join(text.splitlines(keepends=True)[1:]),
        lambda text: text.replace("attention_score", "score"),
        lambda text: re.sub(r"[\d.]+\n$", "\n", text),
        lambda text: text + text.splitlines()[-1] + "\n",
    ],
)
def test_a_damaged_score_table_is_refused_by_name(run: Run, damage: Callable[[str], str]) -> None:
    score = np.linspace(1, 2, 9)
    write_csv(run, "scores.csv", table_of(score, score, None))
    path = run.folder / "scores.csv"
    assert len(read_scores(path, 9)) == 9
    path.write_text(damage(path.read_text()))
    with pytest.raises(InputError, match=r"scores\.csv of .* is damaged.* 9 tokens: run notebooks/02_score_tokens"):
        read_scores(path, 9)


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" a", "' a'"), ("\n", r"'\n'"), ("\\xe2", r"'\xe2'"), ("\u200b", r"'\u200b'"), ("é", "'é'"), ("it's", "'it's'")],
)
def test_a_token_is_shown_with_its_blanks_and_what_cannot_be_printed(token: str, shown: str) -> None:
    assert quoted(token) == shown


def test_without_a_text_every_token_is_empty(run: Run) -> None:
    write_csv(run, "scores.csv", table_of(np.array([2.0, 1.0]), np.array([1.5, 0.5]), None))
    assert list(read_scores(run.folder / "scores.csv", 2)["token"]) == ["", ""]


def test_a_token_is_seen_by_itself_and_all_later_queries() -> None:
    assert list(table_of(np.ones(4), np.ones(4), None)["visible_queries"]) == [4, 3, 2, 1]


def test_eviction_csv_says_kept_exactly_where_the_category_is_not_evicted(run: Run) -> None:
    categories = ["sink", "evicted", "heavy", "evicted", "recent"]
    write_csv(run, "eviction.csv", eviction_table(np.array([5.0, 1.25, 3.0, 0.1, 1.0]), categories))
    assert (run.folder / "eviction.csv").read_text().splitlines() == [
        "token_idx,attention_score,kept,category",
        "0,5.0,True,sink",
        "1,1.25,False,evicted",
        "2,3.0,True,heavy",
        "3,0.1,False,evicted",
        "4,1.0,True,recent",
    ]


def test_a_written_table_is_an_artefact_of_the_run_and_nothing_else_lies_about(run: Run) -> None:
    write_csv(run, "eviction.csv", eviction_table(np.ones(1), ["sink"]))
    assert "eviction.csv" in run.manifest["artefacts"]
    assert {file.name for file in run.folder.iterdir()} <= {"manifest.json", "scores.csv", "eviction.csv"}


def test_the_highest_scores_are_listed_from_the_top_the_earlier_token_first_among_equals() -> None:
    table = highest_scores(np.array([1.0, 3.0, 2.0, 3.0]), np.array([1.0, 1.5, 4.0, 1.0]), ["a", "b", "\n", "NA"], n=3)
    assert list(table["token index"]) == [1, 3, 2]
    assert list(table["token"]) == ["'b'", "'NA'", r"'\n'"]
    assert list(table["score ÷ null"]) == ["2.00", "3.00", "0.50"]


def test_the_heavy_hitters_shown_are_those_of_the_summary_with_their_own_tokens() -> None:
    summary = {
        "run": {"top_heavy": [{"token_idx": 2, "attention_score": 9.0}, {"token_idx": 1, "attention_score": 1.0}]}
    }
    scores = table_of(np.ones(3), np.ones(3), ["zero", "one", "two"])
    assert heavy_hitters(summary, scores).to_dict("list") == {
        "token index": [2, 1],
        "token": ["'two'", "'one'"],
        "score": ["9.00", "1.00"],
    }


def test_every_part_of_a_shown_table_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token may be a script tag, and a report is opened by people who didn't make it."""
    shown: list[Any] = []
    monkeypatch.setattr(notebook, "display", shown.append)
    evil = "<script>alert(1)</script>"
    table = highest_scores(np.array([1.0]), np.array([1.0]), [evil]).rename(columns={"score": f"score {evil}"})
    notebook.show_table(table, f"caption {evil}")
    (html,) = (part.data for part in shown)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3


def test_columns_of_numbers_stand_right_and_columns_of_text_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(notebook, "display", shown.append)
    notebook.show_table(highest_scores(np.array([1234.5]), np.array([1.0]), ["7"]), "numbers")
    (html,) = (part.data for part in shown)
    assert '<td style="text-align: right">1,234.50</td>' in html
    assert '<td style="text-align: left">&#x27;7&#x27;</td>' in html
