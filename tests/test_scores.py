"""Scores, the null and the demo's figures, each against its definition written out."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.errors import InputError
from helpers.policies import evict
from helpers.scores import (
    SCORES,
    attention_mass,
    chance_overlap,
    describe_eviction,
    heavy_among_earliest,
    heavy_tail,
    scores_by_group,
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
    np.testing.assert_allclose(attention_mass({"mass": mass}), truth, rtol=1e-14)


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


# -- every score, from a matrix of probabilities


def captured_from(p: np.ndarray) -> dict[str, torch.Tensor]:
    """The statistics of a capture, summed one query at a time from probabilities [H, L, L]."""
    n = p.shape[1]
    sums = {
        "mass": p.sum(axis=1),
        "mass_window": p[:, max(0, n - 32) :].sum(axis=1),
        "mass_last": p[:, -1],
        "mass_decayed": sum(0.98 ** (n - 1 - i) * p[:, i] for i in range(n)),
    }
    return {name: torch.from_numpy(value) for name, value in sums.items()}


def causal(n_heads: int, n: int, seed: int = 0) -> np.ndarray:
    p = np.tril(np.random.default_rng(seed).random((n_heads, n, n)) ** 4)
    return p / p.sum(axis=-1, keepdims=True)


def plain_score(name: str, p: np.ndarray) -> list[float]:
    """Each score as its definition reads, with loops over tokens, queries and heads."""
    n_heads, n, _ = p.shape

    def mass(j: int, queries: range) -> float:
        return math.fsum(p[h, i, j] for h in range(n_heads) for i in queries if i >= j)

    every, window = range(n), range(max(0, n - 32), n)
    in_window = [mass(j, window) for j in range(n)]
    return [
        {
            "sum": lambda j: mass(j, every),
            "mean": lambda j: mass(j, every) / (n_heads * (n - j)),
            "calibrated": lambda j: mass(j, every) / (n_heads * math.fsum(1 / (i + 1) for i in range(j, n))),
            "window": lambda j: math.fsum(in_window[k] for k in range(max(0, j - 2), min(n, j + 3))) / 5,
            "last": lambda j: mass(j, range(n - 1, n)),
            "decayed": lambda j: math.fsum(0.98 ** (n - 1 - i) * mass(j, range(i, i + 1)) for i in every),
        }[name](j)
        for j in range(n)
    ]


@pytest.mark.parametrize("n", [1, 3, 45])
@pytest.mark.parametrize("name", SCORES)
def test_every_score_equals_its_definition(name: str, n: int) -> None:
    p = causal(3, n)
    np.testing.assert_allclose(SCORES[name](captured_from(p)), plain_score(name, p), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SCORES)
def test_a_groups_score_is_that_of_its_heads_alone(name: str) -> None:
    p = causal(6, 20)
    for n_groups in (1, 2, 6):
        size = 6 // n_groups
        truth = [plain_score(name, p[first : first + size]) for first in range(0, 6, size)]
        np.testing.assert_allclose(scores_by_group(name, captured_from(p), n_groups), truth, rtol=1e-12, atol=1e-15)


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(InputError, match="6 heads don't make 4 equal groups"):
        scores_by_group("sum", captured_from(causal(6, 4)), 4)


def test_calibrated_mass_of_even_attention_is_one_everywhere() -> None:
    even = np.tril(np.ones((2, 30, 30)))
    even /= even.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(SCORES["calibrated"](captured_from(even)), 1, rtol=1e-12)


# -- heavy tails


@given(st.lists(st.integers(0, 20).map(float), min_size=2, max_size=120))
def test_heavy_tail_equals_plain_definitions(values: list[float]) -> None:
    score, n, total = np.array(values), len(values), math.fsum(values)
    found = heavy_tail(score, evict(values, 1, 1, 3))
    for percent in (1, 5, 10):
        top = sorted(values, reverse=True)[: max(1, round(n * percent / 100))]
        assert found[f"top_{percent}_percent"] == (pytest.approx(sum(top) / total) if total else None)
    pairs = math.fsum(abs(a - b) for a in values for b in values)
    assert found["gini"] == (pytest.approx(pairs / (2 * n * total), abs=1e-12) if total else None)
    ranks = [sum(b < a for b in values) + (values.count(a) + 1) / 2 for a in values]
    if len(set(values)) > 1:
        truth = statistics.correlation(ranks, list(range(n)))
        assert found["rank_correlation"] == pytest.approx(truth, abs=1e-9)
    else:
        assert found["rank_correlation"] is None


def test_the_null_is_its_own_choice_and_falls_with_position() -> None:
    null = uniform_causal_null(256, 64)
    found = heavy_tail(null, evict(null, 4, 32, 64))
    assert found["overlap_with_null"] == 1
    assert found["rank_correlation"] == pytest.approx(-1)
    assert found["heavy_to_evicted"] == pytest.approx(3.49, abs=0.005)


def test_chance_overlap_is_what_random_choices_give() -> None:
    rng = np.random.default_rng(0)
    drawn = [evict(rng.random(60), 4, 6, 20) for _ in range(4000)]
    mean = np.mean([heavy_among_earliest(categories) / 20 for categories in drawn])
    assert chance_overlap(drawn[0]) == pytest.approx(20 / 50)
    assert mean == pytest.approx(0.4, abs=0.01)
    assert chance_overlap(["sink", "recent"]) is None
