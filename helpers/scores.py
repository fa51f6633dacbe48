"""What each token is worth by its attention, and how much of that its position alone explains.

Everything here is numpy on small arrays: one number a token. Definitions: attention mass of key token j is the sum over
query heads and over queries i >= j of the softmax probability p(i -> j).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Scores = npt.NDArray[np.float64]


def attention_mass(mass: torch.Tensor) -> Scores:
    """H2O's score, ``sum``: per-head mass [H, P] -> [P], summed over heads (Zhang et al. 2023, arXiv:2306.14048)."""
    summed: Scores = mass.double().sum(dim=0).cpu().numpy()
    return summed


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
