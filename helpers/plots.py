"""The project's figures: one function each, from plain arrays and tables, in one style.

Colours are Okabe and Ito's colour-blind safe set (https://jfly.uni-koeln.de/color/); every category has a marker of its
own too, so that a figure can be read in grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from helpers.scores import Scores

INK = "#222222"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8C8C8C"
# category -> colour, marker, label in the legend
STYLES = {
    "sink": (GREEN, "s", "sink (protected)"),
    "heavy": (ORANGE, "^", "heavy hitter (kept)"),
    "recent": (BLUE, "D", "recent (protected)"),
    "evicted": (GREY, "o", "evicted"),
}
# policy -> colour, marker, line: scores in colours, controls in black and grey
POLICIES = {
    "sum": (ORANGE, "^", "-"),
    "mean": (BLUE, "o", "-"),
    "calibrated": (GREEN, "s", "-"),
    "window": ("#CC79A7", "D", "-"),
    "last": ("#56B4E9", "v", "-"),
    "decayed": ("#B8860B", "P", "-"),
    "oracle": (INK, "*", "-"),
    "recency": (INK, "x", "--"),
    "random": (GREY, ".", ":"),
    "earliest": (GREY, "+", "-."),
}
MANY = 4096  # points beyond this are an image in the SVG: 150 bytes a point make a file that no viewer likes
NULL_LABEL = "uniform-causal null (knows no weights)"


def use_style() -> None:
    """Set the style of every figure; identical data gives identical files (no dates, stable ids in SVG)."""
    sns.set_theme(context="notebook", style="whitegrid", palette=[BLUE, ORANGE, GREEN, GREY])
    mpl.rcParams.update(
        {
            "figure.figsize": (9, 4.6),
            "figure.dpi": 110,
            "savefig.dpi": 110,
            "figure.constrained_layout.use": True,
            "axes.titlelocation": "left",
            "axes.titlesize": 12.5,
            "axes.titleweight": "bold",
            "axes.labelsize": 11,
            "axes.edgecolor": "#BBBBBB",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": "#E6E6E6",
            "text.color": INK,
            "axes.labelcolor": INK,
            "legend.edgecolor": "none",
            "legend.framealpha": 0.85,
            "legend.fontsize": 10,
            "svg.hashsalt": "kv-eviction-mla",
            "svg.fonttype": "none",  # text stays text: small files, and words that can be found
        }
    )


def training_curve(losses: pd.DataFrame) -> Figure:
    """Loss by tokens trained: each step's, smoothed, and the held-out and the copied text's; stages side by side."""
    figure, axes = plt.subplots()
    millions = losses["tokens"].cumsum() / 1e6
    smooth = losses["loss"].groupby(losses["stage"], sort=False).transform(lambda loss: loss.ewm(span=20).mean())
    axes.plot(millions, losses["loss"], color=GREY, linewidth=0.6, alpha=0.6, rasterized=True)
    axes.plot(millions, smooth, color=INK, linewidth=1.4, label="training sequences")
    for column, colour, marker, label in (
        ("held_out_loss", BLUE, "o", "held-out text"),
        ("copied_loss", ORANGE, "^", "held-out text, the second time"),
    ):
        measured = losses[column].notna()
        axes.plot(millions[measured], losses[column][measured], color=colour, marker=marker, markersize=4, label=label)
    for stage, part in millions.groupby(losses["stage"], sort=False):
        if part.iloc[0] > millions.iloc[0]:
            axes.axvline(part.iloc[0], color=GREY, linewidth=1, linestyle=":")
        axes.text(part.mean(), 0.985, str(stage), transform=axes.get_xaxis_transform(), ha="center", va="top")
    axes.set(xlabel="tokens trained, millions", ylabel="loss, nats a token", title="Loss during training")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def overlap_by_layer(layers: pd.DataFrame, title: str) -> Figure:
    """Share of each layer's heavy set that the null would keep too, beside what a set drawn at random would share."""
    figure, axes = plt.subplots()
    overlap = layers["overlap_with_null"]
    axes.bar(overlap.index, overlap, width=0.6, color=BLUE, label="heavy set")
    random: dict[str, Any] = {"color": ORANGE, "markersize": 38, "markeredgewidth": 2, "label": "drawn at random"}
    axes.plot(layers.index, layers["chance"], "_", **random)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1.6, label=NULL_LABEL)
    axes.set(xlabel="layer", ylabel="share that the null would keep", title=title, ylim=(0, 1.08))
    axes.set_xticks(list(layers.index))
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=3, handlelength=3.2)
    return figure


def mass_by_head(mass: np.ndarray, title: str) -> Figure:
    """Heat map of attention mass [heads, tokens], on a logarithmic scale, since it spans orders of magnitude.

    The scale ends at the 1st and 99th percentile where a few tokens, such as a sink, would take it all for themselves.
    """
    figure, axes = plt.subplots()
    positive = mass[mass > 0]
    low, high = np.percentile(positive, (1, 99))
    below, above = positive.min() < low / 4, positive.max() > high * 4
    scale = LogNorm(low if below else positive.min(), high if above else positive.max())
    image = axes.imshow(mass, aspect="auto", cmap="cividis", norm=scale, interpolation="nearest", rasterized=True)
    ends = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    figure.colorbar(image, label="attention mass (queries)", pad=0.015, extend=ends[bool(below), bool(above)])
    axes.set(xlabel="key token index", ylabel="query head", title=title)
    axes.grid(visible=False)
    return figure


def scores_and_null(scores: Mapping[str, Scores], null: Scores, title: str) -> Figure:
    """Each token's score beside the null's, by token index, a panel an input."""
    figure, panels = plt.subplots(1, len(scores), figsize=(9 if len(scores) == 1 else 11, 4.6), squeeze=False)
    for axes, (name, score) in zip(panels[0], scores.items(), strict=True):
        axes.plot(score, "o", color=BLUE, markersize=4, alpha=0.8, label="attention mass", rasterized=len(score) > MANY)
        axes.plot(null, "--", marker=_marker(null), color=INK, linewidth=1.6, label=NULL_LABEL)
        axes.set(xlabel=f"token index, {name}", ylabel="attention mass")
        _show_all(axes, score, null)
    _title_above(figure, title)
    panels[0][0].legend()
    return figure


def calibrated_score(score: Scores, null: Scores, title: str) -> Figure:
    """Score divided by the null at each token."""
    figure, axes = plt.subplots()
    ratio = score / null
    axes.axhline(1.0, color=INK, linewidth=1.6, linestyle="--", label=NULL_LABEL)
    axes.plot(
        ratio, "o", color=ORANGE, markersize=4, alpha=0.8, label="attention mass ÷ null", rasterized=len(score) > MANY
    )
    _plain_log_scale(axes)
    low, high = np.log(ratio[ratio > 0].min()), np.log(ratio.max())
    room = 0.05 + 0.15 * (high - low)
    axes.set_ylim(np.exp(low - room), np.exp(high + 0.2 + 0.25 * (high - low)))  # the legend stands above the points
    axes.set(xlabel="token index", ylabel="mass ÷ null", title=title)
    axes.legend(loc="upper right", ncols=2)
    return figure


def score_by_category(table: pd.DataFrame, null: Scores, title: str) -> Figure:
    """Score against token index, one colour and marker a category; ``table`` is ``eviction.csv``'s."""
    figure, axes = plt.subplots()
    many = len(table) > MANY  # the null then goes above the cloud that would hide it
    axes.plot(
        table["token_idx"], null, "--", marker=_marker(null), color=INK, linewidth=1.4, label=NULL_LABEL,
        zorder=3 if many else 1,
    )  # fmt: skip
    for category, (colour, marker, label) in STYLES.items():
        rows = table[table["category"] == category]
        if len(rows):
            axes.scatter(
                rows["token_idx"], rows["attention_score"], c=colour, marker=marker, s=26, edgecolor="white",
                linewidth=0 if many else 0.4, label=f"{label}: {len(rows):,}", zorder=2, rasterized=many,
            )  # fmt: skip
    axes.set(xlabel="token index", ylabel="attention mass", title=title)
    _show_all(axes, table["attention_score"], null)
    axes.legend()
    return figure


def sorted_scores(score: Scores, null: Scores, budget: int, n_protected: int, title: str) -> Figure:
    """Scores from the highest to the lowest, this run's and the null's, on a logarithmic scale."""
    figure, axes = plt.subplots()
    rank = np.arange(1, len(score) + 1)
    axes.plot(rank, np.sort(score)[::-1], marker=_marker(score), color=ORANGE, linewidth=2.2, label="this run")
    axes.plot(rank, np.sort(null)[::-1], "--", marker=_marker(null), color=INK, linewidth=1.6, label=NULL_LABEL)
    kept = min(budget + n_protected, len(score))
    axes.axvline(kept, color=BLUE, linewidth=1.2, linestyle=":", label=f"size of the cache: {kept:,} tokens")
    _plain_log_scale(axes)
    axes.set(xlabel="rank", ylabel="attention mass", title=title)
    axes.legend()
    return figure


def policy_curves(panels: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Mean over texts against budget, a line a policy, with the 95 % interval as a band; panels side by side.

    ``panels`` maps what a panel shows to a table with the columns policy, budget, mean, low, high, one row a policy and
    budget. Fractions, drawn as percent.
    """
    figure, all_axes = plt.subplots(1, len(panels), figsize=(11, 5.2), squeeze=False)
    labels: dict[str, Artist] = {}
    for axes, (shown, means) in zip(all_axes[0], panels.items(), strict=True):
        budgets = sorted(means["budget"].unique())
        for policy in [name for name in POLICIES if name in set(means["policy"])]:
            colour, marker, line = POLICIES[policy]
            rows = means[means["policy"] == policy].sort_values("budget")
            (curve,) = axes.plot(rows["budget"], rows["mean"], line, color=colour, marker=marker, linewidth=1.8)
            labels.setdefault(policy, curve)
            axes.fill_between(rows["budget"], rows["low"], rows["high"], color=colour, alpha=0.12, linewidth=0)
        if min(budgets) > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{b:,}" for b in budgets])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("budget: heavy-hitter slots in the middle")
        axes.set_title(shown, fontweight="normal")
    _title_above(figure, title)
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", title="policy")
    return figure


def paired_differences(found: dict[str, pd.DataFrame], ylabel: str, title: str) -> Figure:
    """Paired differences over texts, a dot with its 95 % interval for each policy and budget.

    ``found`` maps a policy to a table of budget, mean, low, high.
    """
    figure, axes = plt.subplots(figsize=(9, 4.8))
    axes.axhline(0, color=INK, linewidth=1.2)
    offsets = np.linspace(-0.28, 0.28, len(found)) if len(found) > 1 else [0.0]
    budgets: list[int] = []
    for offset, (policy, rows) in zip(offsets, found.items(), strict=True):
        colour, marker, _ = POLICIES[policy]
        budgets = list(rows["budget"])
        errors = np.abs(rows[["low", "high"]].to_numpy().T - rows["mean"].to_numpy())
        axes.errorbar(
            np.arange(len(rows)) + offset, rows["mean"], yerr=np.nan_to_num(errors), fmt=marker, color=colour,
            markersize=6, capsize=2.5, linewidth=1.4, label=policy,
        )  # fmt: skip
    axes.set_xticks(range(len(budgets)), [f"{b:,}" for b in budgets])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+.3g}" if value else "0"))
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="budget: heavy-hitter slots in the middle", ylabel=ylabel, title=title)
    figure.legend(loc="outside right upper", title="policy")
    return figure


def _title_above(figure: Figure, title: str) -> None:
    """The title of a figure of several panels, which would run into each other as titles of panels."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=mpl.rcParams["axes.titlesize"], fontweight="bold")


def _marker(values: Scores) -> str:
    """A line of a single token is a cross: it would not show otherwise."""
    return "x" if len(values) == 1 else ""


def _show_all(axes: Axes, score: Scores | pd.Series, null: Scores) -> None:
    """Start the y axis at 0, or make it logarithmic where one sink would press all other tokens to the bottom."""
    if score.max() > 2 * null.max():
        _plain_log_scale(axes)
        axes.set_ylabel("attention mass (logarithmic)")
    else:
        axes.set_ylim(bottom=0)


def _plain_log_scale(axes: Axes) -> None:
    """A logarithmic y axis whose ticks read 0.5, 1, 2, 10, not powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
