"""The figures that the published demo reported, shown beside every run's own and the null's.

Source: the published walk-through of H2O on layer 0 of Kimi K2.6 (real weights, BF16, 256 random embeddings, 4 sinks,
32 recents, budget 64), for which no address can be given here. Figures that it did not report are absent. Its text
calls the top scores "roughly 10 x the mean"; its own figures give 319.18 / 64 = 5.
"""

from __future__ import annotations

from typing import Any

SOURCE = "walk-through of H2O on Kimi K2.6 layer 0: real weights, BF16, 256 random embeddings"
GEOMETRY = {"seq_len": 256, "n_sink": 4, "n_recent": 32, "budget": 64, "n_heads": 64}

FIGURES: dict[str, Any] = {
    "score_min": 0.336,
    "score_max": 350.87,
    "score_mean": 64.000,
    "score_std": 64.217,
    "counts": {"sink": 4, "recent": 32, "heavy": 64, "evicted": 156, "kept": 100},
    "shares": {"sink": 4 / 256, "recent": 32 / 256, "heavy": 64 / 256, "evicted": 156 / 256, "kept": 100 / 256},
    "top_heavy": [{"attention_score": 319.18}],
    "heavy_mean": 141.08,
    "evicted_mean": 38.58,
    "heavy_to_evicted": 3.66,
}
