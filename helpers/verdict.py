"""What a comparison of policies says: sentences and tables from the judged texts, none of them written beforehand."""

from __future__ import annotations

import pandas as pd

from helpers.comparison import over_texts, paired, shared_one_shot
from helpers.layer import AttentionLayer
from helpers.metrics import cache_bytes
from helpers.parameters import Parameters
from helpers.scores import SCORES


def intervals(means: pd.DataFrame) -> pd.DataFrame:
    """One row a policy, one column a budget: mean and 95 % interval over texts, in percent.

    ``means`` as :func:`helpers.comparison.over_texts` gives them.
    """
    names = [
        row.policy
        + (", per head" if row.selection == "per-head" else "")
        + (", online" if row.start == "first-token" else "")
        for row in means.itertuples()
    ]
    cells = [_percent(row.mean, row.low, row.high) for row in means.itertuples()]
    wide = means.assign(policy=names, shown=cells).pivot_table(
        index="policy", columns="budget", values="shown", aggfunc="first", sort=False
    )
    return wide.reset_index().rename(columns={b: f"budget {b:,}" for b in sorted(means["budget"].unique())})


def leaders(texts: pd.DataFrame, measure: str = "share_kept") -> pd.DataFrame:
    """At each budget, the head-shared one-shot score with the best mean, its runner-up, and the paired lead over it."""
    means = over_texts(texts, measure)
    plain = means[(means["selection"] == "head-shared") & (means["start"] == "one-shot") & means["policy"].isin(SCORES)]
    rows = []
    for budget, group in plain.groupby("budget"):
        order = list(group.sort_values("mean", ascending=measure.startswith("error"), kind="stable")["policy"])
        if len(order) < 2:
            continue
        lead = paired(texts, measure, shared_one_shot(order[0]), shared_one_shot(order[1])).set_index("budget")
        rows.append([budget, order[0], order[1], *lead.loc[budget]])
    return pd.DataFrame(rows, columns=["budget", "best", "next", "mean", "low", "high"])


def who_leads(texts: pd.DataFrame, measure: str, what: str) -> str:
    """Which score is best at ``what``, budget by budget, and whether its lead is more than these texts' chance."""
    found = leaders(texts, measure)
    if found.empty:
        return "There is one score only: none leads."
    parts = []
    for row in found.itertuples():
        lead = f"{100 * row.mean:+.2f} points"
        if pd.notna(row.low):
            lead += f" [{100 * row.low:+.2f}, {100 * row.high:+.2f}]"
        tie = "" if _differs(row.low, row.high) else ": no clear lead"
        parts.append(f"at budget {row.budget:,} `{row.best}` (against `{row.next}` {lead}{tie})")
    return f"Best at {what}: " + "; ".join(parts) + "."


def who_leads_title(texts: pd.DataFrame, measure: str, what: str) -> str:
    """The title of a measure's figure: the score that is best at every budget, or at the smallest and the largest."""
    best = leaders(texts, measure)
    if best.empty:
        return f"{what.capitalize()}, by policy"
    small, large = best.iloc[0], best.iloc[-1]
    between = [name for name in best["best"].unique() if name not in (small["best"], large["best"])]
    if best["best"].nunique() == 1:
        return f"{what.capitalize()}: {small['best']} at every budget"
    ends = f"{small['best']} at budget {small['budget']:,}, {large['best']} at {large['budget']:,}"
    return f"{what.capitalize()}: {ends}" + (f" ({' and '.join(between)} between)" if between else "")


def against(texts: pd.DataFrame, control: str, measure: str = "share_kept", score: str = "sum") -> str:
    """Whether ``score`` does better than a control by a measure, at how many budgets, with paired intervals."""
    name = "H2O (`sum`)" if score == "sum" else f"`{score}`"
    what = "output error" if measure.startswith("error") else "held-out mass"
    if score not in set(texts["policy"]) or control not in set(texts["policy"]):
        return f"{name} and {control} weren't both compared."
    found = paired(texts, measure, shared_one_shot(score), shared_one_shot(control))
    if found["low"].isna().any():
        return f"One text gives no interval: it can't be said whether {name} beats {control} by {what}."
    above, below = int((found["low"] > 0).sum()), int((found["high"] < 0).sum())
    better, worse = (below, above) if measure.startswith("error") else (above, below)
    if better == len(found):
        verdict = f"beats {control} at every budget"
    elif better == 0:
        verdict = f"does not beat {control} at any budget"
    else:
        verdict = f"beats {control} at {better} of {len(found)} budgets only"
    details = f"{worse} clearly worse, {len(found) - better - worse} with an interval that holds 0; "
    return (
        f"By {what}, {name} {verdict} ({details if better < len(found) else ''}the difference runs from "
        f"{100 * found['mean'].min():+.1f} to {100 * found['mean'].max():+.1f} points)."
    )


def cache_table(layer: AttentionLayer, parameters: Parameters, budgets: list[int]) -> pd.DataFrame:
    """Bytes of the layer's cache at each budget and for the whole prompt, latent and expanded."""
    sizes = [min(parameters.seq_len, parameters.n_sink + parameters.n_recent + budget) for budget in budgets]
    rows = []
    for size in [*sizes, parameters.seq_len]:
        stored = cache_bytes(layer, size)
        columns = {f"{form}, bytes": int(nbytes) for form, nbytes in stored.items()}
        rows.append({"tokens kept": size, "share of the prompt": f"{size / parameters.seq_len:.1%}", **columns})
    return pd.DataFrame(rows)


def _differs(low: float, high: float) -> bool:
    return low > 0 or high < 0


def _percent(mean: float, low: float, high: float) -> str:
    if pd.isna(mean):  # a scale without length: random and oracle keep the same
        return "–"
    return f"{100 * mean:.1f}" if pd.isna(low) else f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
