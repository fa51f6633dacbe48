"""The tables of a run as files and as they are shown: ``scores.csv`` and ``eviction.csv``."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from helpers.errors import InputError
from helpers.runs import MADE_BY, Run
from helpers.scores import SCORES, Captured, Scores, attention_mass, uniform_causal_null


def write_csv(run: Run, artefact: str, table: pd.DataFrame) -> None:
    """Write ``table`` as an artefact of ``run``; any token's text survives writing and reading."""
    buffer = io.StringIO()
    table.head(0).to_csv(buffer, index=False, lineterminator="\n")
    # unquoted, a lone carriage return would end a line for many readers
    quoting = csv.QUOTE_NONNUMERIC if {"token", "text"} & set(table) else csv.QUOTE_MINIMAL
    table.to_csv(buffer, index=False, header=False, quoting=quoting, lineterminator="\n")
    run.write_text(artefact, buffer.getvalue())


def score_table(captured: Captured, tokens: list[str] | None) -> pd.DataFrame:
    """``scores.csv``: token_idx, token (empty for random input), attention_score, visible_queries, null_score.

    Behind these stands a column for each further score; ``attention_score`` is ``sum``.
    """
    n_heads, n_tokens = captured["mass"].shape
    return pd.DataFrame(
        {
            "token_idx": np.arange(n_tokens),
            "token": tokens if tokens is not None else [""] * n_tokens,
            "attention_score": attention_mass(captured),
            "visible_queries": np.arange(n_tokens, 0, -1),  # prompt queries at or after the token
            "null_score": uniform_causal_null(n_tokens, n_heads),
            **{name: score(captured) for name, score in SCORES.items() if name != "sum"},
        }
    )


def read_scores(path: Path, seq_len: int) -> pd.DataFrame:
    """Read ``scores.csv`` of ``seq_len`` tokens; a token such as ``NA`` or ``null`` stays text.

    Raises:
        InputError: the file was cut or changed: it hasn't a row of numbers for each token.
    """
    try:
        table = pd.read_csv(path, keep_default_na=False, dtype={"token": str}, lineterminator="\n")
        numbers = table[["attention_score", "null_score", *(name for name in SCORES if name != "sum")]].astype(float)
        whole = list(table["token_idx"]) == list(range(seq_len)) and bool(np.isfinite(numbers).all(axis=None))
    except (ValueError, KeyError):
        whole = False
    if not whole:
        raise InputError(
            f"{path.name} of {path.parent.name} is damaged, it hasn't a row of numbers for each of {seq_len:,} tokens: "
            f"run notebooks/{MADE_BY['scores.csv']}.ipynb again."
        )
    return table


def eviction_table(score: Scores, categories: list[str]) -> pd.DataFrame:
    """``eviction.csv``: token_idx, attention_score, kept, category; kept exactly where the category isn't evicted."""
    return pd.DataFrame(
        {
            "token_idx": np.arange(len(score)),
            "attention_score": score,
            "kept": [category != "evicted" for category in categories],
            "category": categories,
        }
    )


def highest_scores(score: Scores, null: Scores, tokens: list[str] | None, n: int = 10) -> pd.DataFrame:
    """The ``n`` highest scores beside the null's, for people to read."""
    top = np.argsort(-score, kind="stable")[:n]
    return pd.DataFrame(
        {
            "token index": top,
            **({"token": [quoted(tokens[i]) for i in top]} if tokens is not None else {}),
            "score": [f"{score[i]:,.2f}" for i in top],
            "null": [f"{null[i]:,.2f}" for i in top],
            "score ÷ null": [f"{score[i] / null[i]:,.2f}" for i in top],
        }
    )


def heavy_hitters(summary: dict[str, Any], scores: pd.DataFrame) -> pd.DataFrame:
    """The ten heaviest of ``summary.json``, with their tokens where there is a text."""
    top = summary["run"]["top_heavy"]
    tokens = [scores["token"][row["token_idx"]] for row in top]
    return pd.DataFrame(
        {
            "token index": [row["token_idx"] for row in top],
            **({"token": [quoted(token) for token in tokens]} if any(tokens) else {}),
            "score": [f"{row['attention_score']:,.2f}" for row in top],
        }
    )


def quoted(token: str) -> str:
    r"""A token's text in quotes, so that blanks show, with what can't be printed as ``\n`` or ``\u200b``."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
    return f"'{''.join(shown)}'"
