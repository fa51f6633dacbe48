"""Scores, the null and the demo's figures, each against its definition written out."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.policies import evict
from helpers.scores import (
    attention_mass,
    describe_eviction,
    heavy_among_earliest,
    squared_correlation,
    uniform_causal_null,
)


@pytest.mark.parametrize(("seq_len", "n_heads"), [(1, 1), (2, 3), (256, 64), (1000, 9)])
def test_null_equals_its_definition_summed_exactly(seq_len: int, n_heads: int) -> None:
    null = uniform_causal_null(seq_len, n_heads)
    for j in range(seq_len):
        truth = n_heads * math.fsum(1 / (i + 1) for i in range(j, seq_len))
        assert null[j] == pytest.approx(truth, rel=1e-12)


def test_null_equals_column_sums_of_an_even_causal_matrix() -> None:
    matrix = np.tril(np.ones((50, 50)))
    matrix /= matrix.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(uniform_causal_null(50, 7), 7 * matrix.sum(axis=0), rtol=1e-12)


def test_null_of_the_demos_geometry_gives_the_figures_of_the_closed_form() -> None:
    """64 heads, 256 tokens: mean is an identity, extremes are 64·H(256) and 64/256."""
    null = uniform_causal_null(256, 64)
    assert null.mean() == pytest.approx(64, rel=1e-12)
    assert null[0] == pytest.approx(64 * math.fsum(1 / k for k in range(1, 257)), rel=1e-12)
    assert null[-1] == pytest.approx(0.25, rel=1e-12)
    figures = describe_eviction(null, evict(null, 4, 32, 64))
    assert figures["heavy_to_evicted"] == pytest.approx(3.49, abs=0.005)
    assert figures["heavy_among_earliest"] == 64


def test_attention_mass_sums_over_heads_in_float64() -> None:
    mass = torch.rand(64, 100)
    truth = [math.fsum(mass[:, j].tolist()) for j in range(100)]
    np.testing.assert_allclose(attention_mass(mass), truth, rtol=1e-14)


@given(st.lists(st.floats(0.001, 1000), min_size=3, max_size=40))
def test_squared_correlation_of_a_linear_copy_is_one_and_of_a_constant_is_unknown(values: list[float]) -> None:
    score = np.array(values)
    if np.ptp(score) > 1e-6 * score.max():
        assert squared_correlation(score, 3 * score + 1) == pytest.approx(1, abs=1e-6)
    assert squared_correlation(score, np.ones(len(values))) is None


@given(
    st.lists(st.floats(0.001, 1000), min_size=2, max_size=60),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(0, 20),
)
def test_figures_equal_plain_python_statistics(values: list[float], n_sink: int, n_recent: int, budget: int) -> None:
    categories = evict(values, n_sink, n_recent, budget)
    figures = describe_eviction(np.array(values), categories)
    heavy = [value for value, name in zip(values, categories, strict=True) if name == "heavy"]
    evicted = [value for value, name in zip(values, categories, strict=True) if name == "evicted"]
    assert figures["score_mean"] == pytest.approx(statistics.fmean(values))
    assert figures["score_std"] == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-9)
    assert (figures["score_min"], figures["score_max"]) == (min(values), max(values))
    assert figures["heavy_mean"] == (pytest.approx(statistics.fmean(heavy)) if heavy else None)
    assert figures["evicted_mean"] == (pytest.approx(statistics.fmean(evicted)) if evicted else None)
    assert [row["attention_score"] for row in figures["top_heavy"]] == sorted(heavy, reverse=True)[:10]
    assert figures["counts"]["kept"] == len(values) - len(evicted)
    assert figures["shares"]["evicted"] == pytest.approx(len(evicted) / len(values))


def test_heavy_among_earliest_counts_the_overlap_with_the_nulls_choice() -> None:
    categories = ["sink", "heavy", "evicted", "heavy", "heavy", "evicted", "recent"]
    assert heavy_among_earliest(categories) == 2  # of three heavy, two lie among the first three of the middle
