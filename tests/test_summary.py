"""Sentences made from a run's figures: each number is the one counted here, and odd cases still read as sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import published
from helpers.parameters import Parameters
from helpers.policies import evict
from helpers.scores import uniform_causal_null
from helpers.summary import claim, explained, number, summarise

MANIFEST: dict[str, Any] = {
    "checkpoint": {"name": "model", "origin": "trained", "load": "", "parameter_count": 1},
    "shapes": {"attention_mass": [64, 256]},
}


def summary(score: np.ndarray, **changes: Any) -> dict[str, Any]:
    manifest = MANIFEST | {"shapes": {"attention_mass": [64, len(score)]}}
    parameters = Parameters(**changes)
    categories = evict(score, parameters.n_sink, parameters.n_recent, parameters.budget)
    return summarise(parameters, manifest, score, uniform_causal_null(len(score), 64), categories)


def test_the_nulls_own_scores_are_explained_in_full_and_keep_the_earliest() -> None:
    found = summary(uniform_causal_null(256, 64))
    text = explained(found)
    assert "explains 100.0% of the scores' variance (100.0% among" in text
    assert "64 of 64 heavy hitters are among them (by chance 19)" in text  # 64 · 64 / 220 = 18.6
    assert "Heavy hitters have 3.49 times the mean score of evicted tokens, and the null's have 3.49 times." in text
    assert "published demo" not in text
    assert claim(found).endswith("the null shares 64 of 64 heavy hitters")


def test_scores_that_rise_with_the_index_keep_none_of_the_earliest() -> None:
    text = explained(summary(np.arange(1.0, 257.0), budget=7))
    assert "The null would keep the middle's 7 earliest: 0 of 7 heavy hitters are among them (by chance 0.2)" in text
    assert "had budget 64 (here 7): its figures don't compare where they depend on that" in text


def test_every_part_of_the_geometry_that_differs_is_named() -> None:
    text = explained(summary(np.ones(300), n_sink=1, n_recent=2, budget=3))
    for name, theirs in published.GEOMETRY.items():
        here = {"seq_len": 300, "n_sink": 1, "n_recent": 2, "budget": 3}.get(name)
        assert (f"{name} {theirs} (here {here})" in text) == (here is not None), name
    assert "explains" not in text  # constant scores have no variance


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (12345, "12,345"), (0.09, "0.0900"), (0.0352, "0.0352"), (0.5, "0.500"), (9.9994, "9.999"),
     (12.345, "12.35"), (12345.678, "12,345.68"), (0.0, "0.00"), (-0.05, "-0.0500")],
)  # fmt: skip
def test_a_figure_shows_three_digits_or_more(value: float | None, shown: str) -> None:
    assert number(value) == shown
