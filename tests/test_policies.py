"""The eviction policy: exact counts, exact choice, and no surprise at any edge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.errors import InputError
from helpers.policies import CATEGORIES, control_score, evict, kept_tokens

# few distinct values, so that ties are the rule
scores = st.lists(st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(-1e6, 1e6)), max_size=80)
counts = st.integers(0, 90)


def plain_evict(score: list[float], n_sink: int, n_recent: int, budget: int) -> list[str]:
    """The definition, token by token, with no slicing to get wrong."""
    n = len(score)
    categories = []
    for j in range(n):
        if j < n_sink:
            categories.append("sink")
        elif j >= n - n_recent:
            categories.append("recent")
        else:
            rivals = [i for i in range(n) if n_sink <= i < n - n_recent]
            better = sum(score[i] > score[j] or (score[i] == score[j] and i < j) for i in rivals)
            categories.append("heavy" if better < budget else "evicted")
    return categories


@settings(max_examples=1500, deadline=None)
@given(scores, counts, counts, counts)
def test_equals_the_definition_token_by_token(score: list[float], n_sink: int, n_recent: int, budget: int) -> None:
    assert evict(score, n_sink, n_recent, budget) == plain_evict(score, n_sink, n_recent, budget)


@settings(max_examples=1500, deadline=None)
@given(scores, counts, counts, counts)
def test_categories_cover_each_token_once_with_exact_counts(
    score: list[float], n_sink: int, n_recent: int, budget: int
) -> None:
    categories = evict(score, n_sink, n_recent, budget)
    n = len(score)
    sinks = min(n_sink, n)
    recents = min(n_recent, n - sinks)
    middle = n - sinks - recents
    assert len(categories) == n
    assert [categories.count(name) for name in CATEGORIES] == [
        sinks, recents, min(budget, middle), max(0, middle - budget),
    ]  # fmt: skip


def test_the_demos_geometry_keeps_100_of_256() -> None:
    categories = evict(np.random.default_rng(0).random(256), 4, 32, 64)
    assert [categories.count(name) for name in CATEGORIES] == [4, 32, 64, 156]


def test_no_recents_protects_no_recents() -> None:
    """``score[-0:]`` is everything: the trap of slicing from the end."""
    assert evict([3.0, 1.0, 2.0], 0, 0, 1) == ["heavy", "evicted", "evicted"]


def test_ties_go_to_the_lower_index() -> None:
    assert evict([1.0] * 5, 0, 0, 2) == ["heavy", "heavy", "evicted", "evicted", "evicted"]


def test_a_middle_within_the_budget_loses_nothing() -> None:
    assert "evicted" not in evict([5.0, 1.0, 2.0, 4.0], 1, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_takes_tensors_of_any_precision(dtype: torch.dtype) -> None:
    assert evict(torch.tensor([1.0, 3.0, 2.0], dtype=dtype), 0, 0, 1) == ["evicted", "heavy", "evicted"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_cannot_be_ranked_is_refused_by_token(bad: float) -> None:
    with pytest.raises(InputError, match=f"score of token 2 is {bad}"):
        evict([1.0, 2.0, bad], 0, 0, 1)


@pytest.mark.parametrize("name", ["n_sink", "n_recent", "budget"])
def test_negative_counts_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be at least 0, not -1"):
        evict([1.0], **({"n_sink": 0, "n_recent": 0, "budget": 0} | {name: -1}))


def test_scores_by_head_are_refused() -> None:
    with pytest.raises(InputError, match="sum over heads first"):
        evict(torch.rand(4, 8), 0, 0, 1)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(0, 30), counts, counts, counts, st.integers(0, 2**32 - 1))
def test_sets_of_groups_are_those_of_each_alone_and_nested_in_larger_budgets(
    n_groups: int, n: int, n_sink: int, n_recent: int, budget: int, seed: int
) -> None:
    score = np.random.default_rng(seed).integers(0, 4, size=(n_groups, n)).astype(float)
    kept = kept_tokens(score, n_sink, n_recent, budget)
    for row, one in zip(kept, score, strict=True):
        assert list(row) == [category != "evicted" for category in evict(one, n_sink, n_recent, budget)]
    assert (kept <= kept_tokens(score, n_sink, n_recent, budget + 1)).all()


def test_controls_keep_the_latest_the_earliest_and_by_seed_others() -> None:
    def middle(name: str, seed: int = 0) -> list[int]:
        categories = evict(control_score(name, 20, seed), 2, 3, 4)
        return [j for j, category in enumerate(categories) if category == "heavy"]

    assert middle("recency") == [13, 14, 15, 16]
    assert middle("earliest") == [2, 3, 4, 5]
    assert middle("random", 1) == middle("random", 1) != middle("random", 2)


def test_random_keeps_each_token_equally_often() -> None:
    kept = [kept_tokens(control_score("random", 12, seed), 1, 1, 3)[1:-1] for seed in range(4000)]
    np.testing.assert_allclose(np.mean(kept, axis=0), 0.3, atol=0.03)
