"""What each token is worth by its attention, and how much of that its position alone explains.

Everything here is numpy on small arrays: one number a token. Definitions: attention mass of key token j is the sum over
query heads and over queries i >= j of the softmax probability p(i -> j).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from helpers.errors import InputError

Scores = npt.NDArray[np.float64]
Captured = Mapping[str, torch.Tensor]
POOLED = 5  # neighbours that ``window`` averages over (SnapKV's pooling kernel)


def attention_mass(captured: Captured) -> Scores:
    """``sum``, H2O's score [P]: Σ over heads and prompt queries i ≥ j of p(i → j) (Zhang et al., arXiv:2306.14048)."""
    return _over_heads(captured["mass"])


def mean_score(captured: Captured) -> Scores:
    """``mean`` [P]: mass ÷ (heads × prompt queries that see the token), as kvpress's observed attention divides it."""
    n_heads, n_tokens = captured["mass"].shape
    return attention_mass(captured) / (n_heads * np.arange(n_tokens, 0, -1))


def calibrated_score(captured: Captured) -> Scores:
    """``calibrated`` [P]: mass ÷ what the uniform-causal null gives the token; 1 is what its position explains."""
    n_heads, n_tokens = captured["mass"].shape
    return attention_mass(captured) / uniform_causal_null(n_tokens, n_heads)


def window_score(captured: Captured) -> Scores:
    """``window`` [P]: mass from the last 32 prompt queries, averaged over 5 neighbours (SnapKV, arXiv:2404.14469).

    Beyond both ends the average takes zeros, as SnapKV's does. SnapKV leaves the window's own tokens out of it, which
    concerns the two tokens before the window.
    """
    padded = np.pad(_over_heads(captured["mass_window"]), POOLED // 2)
    return np.convolve(padded, np.full(POOLED, 1 / POOLED), mode="valid")


def last_score(captured: Captured) -> Scores:
    """``last`` [P]: mass from the last prompt query, Σ over heads of p(P - 1 → j) (TOVA, arXiv:2401.06104)."""
    return _over_heads(captured["mass_last"])


def decayed_score(captured: Captured) -> Scores:
    """``decayed`` [P]: Σ over heads and prompt queries of γ^(P-1-i) · p(i → j), γ = 0.98 (A2SF, arXiv:2407.20485)."""
    return _over_heads(captured["mass_decayed"])


# A score takes the captured statistics of some heads, by name, each [H, P], and gives one number a token, higher is
# kept. One captured pass serves them all.
SCORES: dict[str, Callable[[Captured], Scores]] = {
    "sum": attention_mass,
    "mean": mean_score,
    "calibrated": calibrated_score,
    "window": window_score,
    "last": last_score,
    "decayed": decayed_score,
}


def scores_by_group(name: str, captured: Captured, n_groups: int) -> Scores:
    """The score ``name`` [G, P] of each of G groups of neighbouring heads on its own.

    G = key-value heads is what a grouped-query cache can use; G = heads is a choice for each query head.
    """
    n_heads = len(captured["mass"])
    if n_groups < 1 or n_heads % n_groups:
        raise InputError(f"{n_heads} heads don't make {n_groups} equal groups.")
    size = n_heads // n_groups
    parts = [slice(first, first + size) for first in range(0, n_heads, size)]
    return np.stack([SCORES[name]({key: mass[part] for key, mass in captured.items()}) for part in parts])


def uniform_causal_null(seq_len: int, n_heads: int) -> Scores:
    """Mass [seq_len] of attention that spreads evenly over what each query can see, and so knows no weights.

    Query i sees i + 1 tokens, so token j collects ``n_heads * sum(1 / (i + 1) for i in range(j, seq_len))``. Early
    tokens are seen by more queries: the mass falls with position whatever the model.
    """
    per_query = 1.0 / np.arange(1, seq_len + 1, dtype=np.float64)
    null: Scores = n_heads * np.cumsum(per_query[::-1])[::-1]
    return null


def squared_correlation(score: Scores, null: Scores) -> float | None:
    """Share of the score's variance that the null explains (squared Pearson correlation).

    None if either is constant, or there are fewer than three tokens, which any line fits.
    """
    if len(score) < 3 or np.ptp(score) == 0 or np.ptp(null) == 0:
        return None
    return float(np.corrcoef(score, null)[0, 1] ** 2)


def heavy_tail(score: Scores, categories: list[str]) -> dict[str, float | None]:
    """How unevenly a score [P] is spread, and how much its choice is that of position; None where undefined.

    - ``top_1_percent``, ``top_5_percent``, ``top_10_percent``: share of all mass that the highest 1, 5, 10 % hold (at
      least one token);
    - ``gini``: 0 if all tokens have the same, towards 1 if one has all;
    - ``heavy_to_evicted``: mean of the heavy hitters kept ÷ mean of the evicted;
    - ``overlap_with_null``: share of the heavy hitters that the null would keep too, the middle's earliest;
    - ``rank_correlation``: Spearman's, of the score with the token's index.
    """
    ordered = np.sort(score)[::-1]
    n, total = len(score), float(score.sum())
    found: dict[str, float | None] = {}
    for percent in (1, 5, 10):
        top = ordered[: max(1, round(n * percent / 100))]
        found[f"top_{percent}_percent"] = float(top.sum() / total) if total else None
    rank = np.arange(n, 0, -1)  # of ``ordered``, counted from the smallest
    found["gini"] = float(2 * (rank * ordered).sum() / (n * total) - (n + 1) / n) if total else None
    described = describe_eviction(score, categories)
    heavy = described["counts"]["heavy"]
    found["heavy_to_evicted"] = described["heavy_to_evicted"]
    found["overlap_with_null"] = described["heavy_among_earliest"] / heavy if heavy else None
    ranks = pd.Series(score).rank().to_numpy()
    varies = n > 1 and np.ptp(score) > 0
    found["rank_correlation"] = float(np.corrcoef(ranks, np.arange(n))[0, 1]) if varies else None
    return found


def chance_overlap(categories: list[str]) -> float | None:
    """Share of the heavy hitters that would be among the middle's earliest if they were drawn at random."""
    heavy, evicted = categories.count("heavy"), categories.count("evicted")
    return heavy / (heavy + evicted) if heavy else None


def describe_eviction(score: Scores, categories: list[str]) -> dict[str, Any]:
    """The published demo's figures, by name, for one score [P] and one category a token.

    ``std`` is the sample's (n - 1), as torch's default; figures of an empty category are None.
    """
    category = np.asarray(categories)
    heavy, evicted = score[category == "heavy"], score[category == "evicted"]
    top = np.argsort(-np.where(category == "heavy", score, -np.inf), kind="stable")[: min(10, len(heavy))]
    counts = {name: int((category == name).sum()) for name in ("sink", "recent", "heavy", "evicted")}
    counts["kept"] = len(score) - counts["evicted"]
    heavy_mean, evicted_mean = _mean(heavy), _mean(evicted)
    return {
        "score_min": float(score.min()),
        "score_max": float(score.max()),
        "score_mean": float(score.mean()),
        "score_std": float(score.std(ddof=1)) if len(score) > 1 else None,
        "counts": counts,
        "shares": {name: count / len(score) for name, count in counts.items()},
        "top_heavy": [{"token_idx": int(i), "attention_score": float(score[i])} for i in top],
        "heavy_mean": heavy_mean,
        "evicted_mean": evicted_mean,
        "heavy_to_evicted": heavy_mean / evicted_mean if heavy_mean is not None and evicted_mean else None,
        "heavy_among_earliest": heavy_among_earliest(categories),
    }


def heavy_among_earliest(categories: list[str]) -> int:
    """How many of the k heavy hitters are among the k earliest tokens of the middle, which is the null's own choice."""
    middle = [name for name in categories if name in ("heavy", "evicted")]
    return middle[: middle.count("heavy")].count("heavy")


def _mean(values: Scores) -> float | None:
    return float(values.mean()) if len(values) else None


def _over_heads(mass: torch.Tensor) -> Scores:
    summed: Scores = mass.double().sum(dim=0).cpu().numpy()
    return summed
