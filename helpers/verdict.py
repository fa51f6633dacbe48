"""What a comparison of policies says: sentences and tables from the judged texts, none of them written beforehand."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from helpers.comparison import Form, is_error, over_texts, paired, shared_one_shot
from helpers.layer import AttentionLayer
from helpers.metrics import FEWEST, cache_bytes
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
        order = list(group.sort_values("mean", ascending=is_error(measure), kind="stable")["policy"])
        if len(order) < 2:
            continue
        lead = paired(texts, measure, shared_one_shot(order[0]), shared_one_shot(order[1])).set_index("budget")
        rows.append([budget, order[0], order[1], *lead.loc[budget]])
    return pd.DataFrame(rows, columns=["budget", "best", "next", "mean", "low", "high"])


def who_leads(texts: pd.DataFrame, measure: str, what: str) -> str:
    """Which score is best at ``what``, budget by budget, and whether its lead is more than these texts' chance."""
    found = leaders(texts, measure)
    if found.empty:
        return "Fewer than two scores were compared: none leads."
    parts = []
    for row in found.itertuples():
        lead = f"{100 * row.mean:+.2f} points"
        if pd.notna(row.low):
            lead += f" [{100 * row.low:+.2f}, {100 * row.high:+.2f}]"
        tie = "" if _differs(row.low, row.high) else ": no clear lead"
        parts.append(f"at budget {row.budget:,} `{row.best}` (against `{row.next}` {lead}{tie})")
    return f"Best at {what}: " + "; ".join(parts) + "."


def who_leads_title(texts: pd.DataFrame, measure: str, what: str) -> str:
    """The title of a measure's figure: which scores clearly lead, at how many budgets."""
    best = leaders(texts, measure)
    clear = Counter(row.best for row in best.itertuples() if _differs(row.low, row.high)).most_common()
    if not clear:
        return f"{what}: no score clearly leads"
    if clear[0][1] == len(best):
        return f"{what}: {clear[0][0]} at every budget"
    counts = ", ".join(f"{name} at {n}" for name, n in clear)
    return f"{what}: {counts} of {len(best)} budgets"


def verdicts(texts: pd.DataFrame, measure: str) -> list[str]:
    """A sentence each: H2O as the demo has it against recency, the null and chance; the paper's form; the oracle."""
    if "sum" not in set(texts["policy"]):
        return ["H2O (`sum`) wasn't among the compared policies."]
    if texts["text"].nunique() < FEWEST:
        return [f"Fewer than {FEWEST} texts give no interval: whether H2O (`sum`) beats anything can't be said."]
    controls = {"recency": "recency", "earliest": "the null (`earliest`)", "random": "chance (`random`)"}
    compared = [name for name in controls if name in set(texts["policy"])]
    ours = shared_one_shot("sum")
    found = [against(texts, "H2O (`sum`)", ours, controls[name], shared_one_shot(name), measure) for name in compared]
    if "recency" in compared:
        paper = ("sum", "per-head", "first-token")
        name = "H2O as in its paper (`sum` per head, online)"
        found.append(against(texts, name, paper, "recency", shared_one_shot("recency"), measure))
    gap = 100 * paired(texts, measure, ours, shared_one_shot("oracle"))["mean"]
    found.append(f"H2O (`sum`) less the mass oracle: from {gap.min():+.1f} to {gap.max():+.1f} points.")
    return found


def against(texts: pd.DataFrame, name: str, ours: Form, other: str, theirs: Form, measure: str = "share_kept") -> str:
    """Whether one form of a policy does better than another by a measure, and at how many budgets (95 % intervals)."""
    found = paired(texts, measure, ours, theirs)
    above, below = int((found["low"] > 0).sum()), int((found["high"] < 0).sum())
    better, worse = (below, above) if is_error(measure) else (above, below)
    differences = 100 * found["mean"]
    spread = f"the difference runs from {differences.min():+.1f} to {differences.max():+.1f} points"
    by = f"By {'output error' if is_error(measure) else 'held-out mass'}, {name}"
    if better == len(found):
        return f"{by} beats {other} at every budget ({spread})."
    verdict = (
        f"beats {other} at {better} of {len(found)} budgets only" if better else f"does not beat {other} at any budget"
    )
    undecided = len(found) - better - worse
    return f"{by} {verdict} ({worse} clearly worse, {undecided} with an interval that holds 0; {spread})."


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
    if pd.isna(mean):  # no scale: the oracle isn't clearly better than random
        return "–"
    return f"{100 * mean:.1f}" if pd.isna(low) else f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
