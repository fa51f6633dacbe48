"""A run's figures beside the null's and the published demo's: one dictionary, one table, and sentences from it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from helpers import published
from helpers.parameters import Parameters
from helpers.policies import evict
from helpers.scores import Scores, describe_eviction, squared_correlation

# figure's key -> how it reads, in the order of the published report
NAMES = {
    "score_min": "score, minimum",
    "score_max": "score, maximum",
    "score_mean": "score, mean",
    "score_std": "score, standard deviation (n − 1)",
    "top_heavy": "top heavy hitter",
    "heavy_mean": "mean of heavy hitters kept",
    "evicted_mean": "mean of evicted",
    "heavy_to_evicted": "heavy ÷ evicted",
    "heavy_among_earliest": "heavy hitters among the earliest of the middle",
}


def summarise(
    parameters: Parameters, manifest: dict[str, Any], score: Scores, null: Scores, categories: list[str]
) -> dict[str, Any]:
    """Return ``summary.json``: the demo's figures by name for this run, for the null under its policy, and published.

    ``manifest`` is the run's; ``score`` (attention mass) and ``null`` are [P], ``categories`` the run's, one a token.
    """
    checkpoint = manifest["checkpoint"]
    n_sink, n_recent, budget = parameters.n_sink, parameters.n_recent, parameters.budget
    middle = slice(n_sink, len(score) - n_recent)
    config = (
        f"layer={parameters.layer} seq_len={len(score)} n_sink={n_sink} n_recent={n_recent} budget={budget} "
        f"dtype={parameters.dtype}"
    )
    return {
        "config": config,
        "score": parameters.score,
        "geometry": {
            "n_heads": manifest["shapes"]["attention_mass"][0],
            "seq_len": len(score),
            "n_sink": n_sink,
            "n_recent": n_recent,
            "budget": budget,
        },
        "checkpoint": checkpoint["name"],
        "weights": checkpoint["origin"],
        "load": checkpoint["load"],
        "parameter_count": checkpoint["parameter_count"],
        "shapes": manifest["shapes"],
        "run": describe_eviction(score, categories),
        "null": describe_eviction(null, evict(null, n_sink, n_recent, budget)),
        "published": {"source": published.SOURCE, **published.FIGURES},
        "squared_correlation_with_null": squared_correlation(score, null),
        "squared_correlation_with_null_in_the_middle": squared_correlation(score[middle], null[middle]),
    }


def comparison(summary: dict[str, Any]) -> pd.DataFrame:
    """One row a figure: published, this run, the null, and the null divided by this run."""
    rows = []
    for key, name in NAMES.items():
        published_value, run, null = (_single(summary[column].get(key)) for column in ("published", "run", "null"))
        # that the null keeps the earliest is its definition, not a finding
        ratio = null / run if run and null is not None and key != "heavy_among_earliest" else None
        shown = "not reported" if published_value is None else number(published_value)
        rows.append([name, shown, number(run), number(null), number(ratio)])
    for category in ("sink", "recent", "heavy", "evicted", "kept"):
        cells = []
        for column in ("published", "run", "null"):
            count, part = summary[column]["counts"][category], summary[column]["shares"][category]
            cells.append(f"{count:,} ({part:.1%})")
        rows.append([f"tokens: {category}", *cells, "–"])
    return pd.DataFrame(rows, columns=["figure", "published demo", "this run", "null", "null ÷ this run"])


def headline(summary: dict[str, Any]) -> str:
    """What the policy did, in one sentence."""
    counts, shares = summary["run"]["counts"], summary["run"]["shares"]
    n_tokens = counts["kept"] + counts["evicted"]
    if not counts["evicted"]:
        return f"The middle has no more tokens than the budget: all {n_tokens:,} tokens are kept, nothing is evicted."
    return (
        f"{_policy(summary)} keeps {counts['kept']:,} of {n_tokens:,} tokens ({shares['kept']:.1%}: "
        f"{counts['sink']:,} sinks, {counts['recent']:,} recents, {counts['heavy']:,} heavy hitters) and evicts "
        f"{counts['evicted']:,} ({shares['evicted']:.1%})."
    )


def claim(summary: dict[str, Any]) -> str:
    """The title of the figure: what was kept, and how much of that is only being early."""
    counts = summary["run"]["counts"]
    if not counts["evicted"]:
        return f"All {counts['kept']:,} tokens fit: nothing is evicted"
    kept = f"{_policy(summary)} keeps {counts['kept']:,} of {counts['kept'] + counts['evicted']:,} tokens"
    if not counts["heavy"]:
        return f"{kept}, none of them for its score"
    early, heavy = summary["run"]["heavy_among_earliest"], counts["heavy"]
    return f"{kept}; the null shares {early:,} of {heavy:,} heavy hitters"


def explained(summary: dict[str, Any]) -> str:
    """How much of the result needs no weights at all, in one or two sentences."""
    run, null = summary["run"], summary["null"]
    r2, among = summary["squared_correlation_with_null"], summary["squared_correlation_with_null_in_the_middle"]
    sentences = []
    if r2 is not None:
        sentences.append(
            f"The uniform-causal null, which knows a token's position and no weight, explains {r2:.1%} of the scores' "
            "variance"
            + ("." if among is None else f" ({among:.1%} among the tokens of the middle, which may be evicted).")
        )
    if run["counts"]["heavy"] and run["counts"]["evicted"]:
        heavy, middle = run["counts"]["heavy"], run["counts"]["heavy"] + run["counts"]["evicted"]
        by_chance = heavy * heavy / middle
        sentences.append(
            f"The null would keep the middle's {heavy:,} earliest: {run['heavy_among_earliest']:,} of {heavy:,} heavy "
            f"hitters are among them (by chance {by_chance:,.{0 if by_chance >= 10 else 1}f}). Heavy hitters have "
            f"{run['heavy_to_evicted']:.2f} times the mean score of evicted tokens, and the null's have "
            f"{null['heavy_to_evicted']:.2f} times."
        )
    ours = summary["geometry"]
    others = [
        f"{name} {theirs:,} (here {ours[name]:,})"
        for name, theirs in published.GEOMETRY.items()
        if theirs != ours[name]
    ]
    if others:
        sentences.append(
            f"The published demo had {', '.join(others)}: its figures don't compare where they depend on that, the "
            "null's, made for this run, do."
        )
    if summary["weights"].startswith("RANDOM"):
        sentences.append("The weights of this run are random: its figures say nothing about a trained model.")
    return " ".join(sentences)


def _policy(summary: dict[str, Any]) -> str:
    return "H2O" if summary["score"] == "sum" else f"The score '{summary['score']}'"


def _single(value: Any) -> float | None:
    """The figure as one number: of the top scores, the first."""
    if isinstance(value, list):
        return value[0]["attention_score"] if value else None
    return value


def number(value: float | None) -> str:
    """How a figure reads: thousands apart, three digits or more of what is small; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:#.3g}" if abs(value) < 0.1 else f"{value:.3f}" if abs(value) < 10 else f"{value:,.2f}"
