"""How heavy the tail of a score is, beside what no weights (the null) and random weights make of it."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch

from helpers.capture import prompt_statistics
from helpers.layer import AttentionLayer, random_attention
from helpers.parameters import Parameters
from helpers.policies import evict
from helpers.scores import Scores, attention_mass, chance_overlap, heavy_tail, uniform_causal_null

STATISTICS = {
    "top_1_percent": "share held by the top 1%",
    "top_5_percent": "share held by the top 5%",
    "top_10_percent": "share held by the top 10%",
    "gini": "Gini coefficient",
    "heavy_to_evicted": "heavy ÷ evicted, mean score",
    "overlap_with_null": "overlap of the heavy set with the null's",
    "rank_correlation": "rank correlation with position",
}


def random_scores(
    layer: AttentionLayer, hidden_states: Mapping[str, torch.Tensor], parameters: Parameters
) -> dict[str, list[Scores]]:
    """Attention mass [P] that random weights give, ``n_seeds`` times, for each input by name ([1, L, hidden])."""
    found: dict[str, list[Scores]] = {name: [] for name in hidden_states}
    for seed in range(parameters.n_seeds):
        drawn = random_attention(layer, seed)
        for name, states in hidden_states.items():
            prompt = states[:, : parameters.seq_len]
            found[name].append(attention_mass(prompt_statistics(drawn, prompt, parameters.seq_len)))
    return found


def heavy_tails(
    scores: Mapping[str, Scores], random: Mapping[str, list[Scores]], n_heads: int, parameters: Parameters
) -> pd.DataFrame:
    """``heavy_tails.csv``: a row an input and statistic, the null's value and random weights' band beside it.

    Columns: input, statistic, value, random_low, random_high (smallest and largest over seeds), null, chance (of the
    overlap: what heavy hitters drawn at random would give), and the policy, n_sink, n_recent, budget.
    """

    def described(score: Scores) -> dict[str, float | None]:
        return heavy_tail(score, evict(score, *policy))

    policy = (parameters.n_sink, parameters.n_recent, parameters.budget)
    null_score = uniform_causal_null(parameters.seq_len, n_heads)
    null, chance = described(null_score), chance_overlap(evict(null_score, *policy))
    rows = []
    for name, score in scores.items():
        value, drawn = described(score), [described(other) for other in random[name]]
        for statistic in STATISTICS:
            band = [x for other in drawn if (x := other[statistic]) is not None]
            rows.append(
                {
                    "input": name,
                    "statistic": statistic,
                    "value": value[statistic],
                    "random_low": min(band, default=None),
                    "random_high": max(band, default=None),
                    "null": null[statistic],
                    "chance": chance if statistic == "overlap_with_null" else None,
                    **dict(zip(("n_sink", "n_recent", "budget"), policy, strict=True)),
                }
            )
    return pd.DataFrame(rows)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table for people: a row a statistic; for each input its value and the random weights' band; the null."""
    columns: dict[str, list[str]] = {"statistic": list(STATISTICS.values())}
    for name, rows in table.groupby("input", sort=False):
        columns[f"{name}"] = [_number(value) for value in rows["value"]]
        columns[f"{name}, random weights"] = [
            f"{_number(low)} to {_number(high)}"
            for low, high in zip(rows["random_low"], rows["random_high"], strict=True)
        ]
    first = table.drop_duplicates("statistic")
    columns["null"] = [_number(value) for value in first["null"]]
    columns["chance"] = [_number(value) for value in first["chance"]]
    return pd.DataFrame(columns)


def beyond_random(table: pd.DataFrame, name: str, n_seeds: int) -> str:
    """Which statistics of input ``name`` lie outside the band of random weights, and how many would by chance.

    Of n + 1 draws that are alike, each is as likely to be the smallest or the largest: a further seed lies outside the
    band of n with probability 2 / (n + 1).
    """
    rows = table[(table["input"] == name) & table["value"].notna() & table["random_low"].notna()]
    outside = rows[(rows["value"] < rows["random_low"]) | (rows["value"] > rows["random_high"])]
    if outside.empty:
        return f"On {name}, none of the {len(rows)} figures lies outside what {n_seeds} seeds of random weights give."
    listed = ", ".join(STATISTICS[statistic] for statistic in outside["statistic"])
    return (
        f"On {name}, {len(outside)} of {len(rows)} figures lie outside what {n_seeds} seeds of random weights give: "
        f"{listed}. By chance alone, {len(rows) * 2 / (n_seeds + 1):.1f} would (those of one more seed)."
    )


def _number(value: float | None) -> str:
    if value is None or pd.isna(value):
        return "–"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
