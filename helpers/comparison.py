"""Policies × budgets on one layer: which tokens each keeps of a prompt, judged by the continuation it never saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from helpers.errors import InputError
from helpers.layer import AttentionLayer
from helpers.memory import is_latent
from helpers.metrics import fraction_of_the_way, mean_interval, output_errors, share_of_kept_mass
from helpers.online import ONLINE_SCORES, online_eviction
from helpers.parameters import Parameters
from helpers.policies import Kept, control_score, kept_tokens, middle_tokens
from helpers.projections import queries_keys_values
from helpers.scores import SCORES, Captured, scores_by_group

# heavy-hitter slots of the curves, as shares of the middle
SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)
MEASURES = {
    "share_kept": "share of held-out mass kept",
    "share_kept_worst_head": "share of held-out mass kept, worst head",
    "error_before": "output error before o_proj",
    "error_after": "output error after o_proj",
}
Form = tuple[str, str, str]  # a policy, its selection and its start
KEYS = ["policy", "selection", "start", "budget"]


@dataclass(frozen=True)
class _Case:
    """One kept set. ``selection``: head-shared or per-head; ``start``: one-shot, or online from the first-token."""

    policy: str
    selection: str
    start: str
    seed: int
    budget: int
    kept: Kept


def curve_budgets(parameters: Parameters) -> list[int]:
    """The heavy-hitter slots to compare at: ``budgets``, or ``SHARES`` of the middle."""
    middle = middle_tokens(parameters.seq_len, parameters.n_sink, parameters.n_recent)
    size = middle.stop - middle.start
    return list(parameters.budgets) or sorted({max(1, round(share * size)) for share in SHARES})


def check_comparison(parameters: Parameters) -> None:
    """Refuse what leaves nothing to compare.

    Raises:
        InputError: no continuation to judge by, or budgets that evict nothing.
    """
    if parameters.continuation < 1:
        raise InputError("Policies are judged by queries after the prompt: set continuation to at least 1.")
    middle = middle_tokens(parameters.seq_len, parameters.n_sink, parameters.n_recent)
    size = middle.stop - middle.start
    largest = max(curve_budgets(parameters))
    if size < 2 or largest >= size:
        remedy = "raise seq_len, or lower n_sink or n_recent"
        if parameters.budgets and size > min(parameters.budgets):
            remedy = f"raise seq_len, or take budgets below {size}"
        raise InputError(
            f"Between {parameters.n_sink} sinks and {parameters.n_recent} recents of seq_len {parameters.seq_len} lie "
            f"{size} {'token' if size == 1 else 'tokens'}, and a budget of {largest} keeps them all: {remedy}."
        )


def compare(
    layer: AttentionLayer, hidden_states: torch.Tensor, captured: Captured, parameters: Parameters
) -> pd.DataFrame:
    """Judge every policy at every budget on one document, ``hidden_states`` [1, P + C, hidden]; a row a kept set.

    ``captured`` holds the document's statistics, each [H, P]. Columns: policy, selection, start, seed, budget, kept
    (tokens a head), and those of ``MEASURES``. Per-head sets are for each key-value head of grouped-query attention,
    and for each query head of MLA, whose one latent for all heads they don't make smaller.
    """
    query, key, value = queries_keys_values(layer, hidden_states)
    cases = list(_cases(layer, query, key, captured, parameters))
    prompt = captured["mass"].shape[-1]
    errors = output_errors(layer, query[:, prompt:], key, value, [case.kept for case in cases])
    rows = []
    for case, before, after in zip(cases, errors.before, errors.after, strict=True):
        pooled, worst = share_of_kept_mass(captured["mass_continuation"], case.kept)
        kept = int(np.atleast_2d(case.kept)[0].sum())
        rows.append(
            [case.policy, case.selection, case.start, case.seed, case.budget, kept, pooled, worst, before, after]
        )
    return pd.DataFrame(rows, columns=[*KEYS[:3], "seed", "budget", "kept", *MEASURES])


def heaviest_of_middle(captured: Captured, parameters: Parameters) -> tuple[int, float]:
    """Of the middle's heaviest token by held-out mass: how many of the middle come after it, and its share of the mass.

    The mass is all that the continuation's queries give to the prompt; a large share is an attractor beyond the sinks.
    """
    mass = SCORES["sum"]({"mass": captured["mass_continuation"]})
    middle = mass[middle_tokens(len(mass), parameters.n_sink, parameters.n_recent)]
    return int(len(middle) - 1 - middle.argmax()), float(middle.max() / mass.sum())


def _cases(
    layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, captured: Captured, parameters: Parameters
) -> Iterator[_Case]:
    n_sink, n_recent, budgets = parameters.n_sink, parameters.n_recent, curve_budgets(parameters)
    n_heads, n_tokens = captured["mass"].shape
    n_groups = n_heads if is_latent(layer.module) else len(key)
    names = [name for name in parameters.policies if name in SCORES]
    continuation = {"mass": captured["mass_continuation"]}
    scores = [(name, "head-shared", 0, SCORES[name](captured)) for name in names]
    scores += [(name, "per-head", 0, scores_by_group(name, captured, n_groups)) for name in names]
    controls = {"recency", "earliest"} & set(parameters.policies)
    scores += [(name, "head-shared", 0, control_score(name, n_tokens)) for name in sorted(controls)]
    # the ends of the scale, whatever is asked for
    scores += [("random", "head-shared", s, control_score("random", n_tokens, s)) for s in range(parameters.n_seeds)]
    scores.append(("oracle", "head-shared", 0, SCORES["sum"](continuation)))
    scores.append(("oracle", "per-head", 0, scores_by_group("sum", continuation, n_groups)))
    for policy, selection, seed, score in scores:
        for budget in budgets:
            kept = kept_tokens(score, n_sink, n_recent, budget)
            yield _Case(policy, selection, "one-shot", seed, budget, kept)
    online = [("head-shared", name, 1) for name in names if name in ONLINE_SCORES]
    if "sum" in names:
        online.append(("per-head", "sum", n_groups))
    if not online:
        return
    found = online_eviction(
        query[:, :n_tokens], key[:, :n_tokens], layer.scaling, n_sink, n_recent, budgets,
        choices=[(name, groups) for _, name, groups in online],
    )  # fmt: skip
    for selection, name, groups in online:
        for budget, evicted_at in zip(budgets, found[name, groups], strict=True):
            stays = evicted_at == n_tokens
            yield _Case(name, selection, "first-token", 0, budget, stays if selection == "per-head" else stays[0])


def by_text(table: pd.DataFrame) -> pd.DataFrame:
    """One row a text, policy and budget: seeds averaged."""
    return table.drop(columns="seed").groupby(["text", *KEYS], sort=False, as_index=False).mean()


def over_texts(texts: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Mean over texts of ``measure`` with its 95 % bootstrap interval: columns ``KEYS``, mean, low, high."""
    rows = [[*keys, *mean_interval(_values(group, measure))] for keys, group in texts.groupby(KEYS, sort=False)]
    return pd.DataFrame(rows, columns=[*KEYS, "mean", "low", "high"])


def of_the_way(texts: pd.DataFrame, measure: str) -> pd.DataFrame:
    """As :func:`over_texts`, for how far from random (0) to the mass oracle (1) each policy gets.

    The scale's ends at a budget are the head-shared ``random`` (mean of its seeds) and mass ``oracle``, and no rows of
    the result.
    """
    sign = -1 if is_error(measure) else 1  # more is better
    ends = texts[(texts["selection"] == "head-shared") & (texts["start"] == "one-shot")]
    rows = []
    for keys, group in texts[~texts["policy"].isin(["random", "oracle"])].groupby(KEYS, sort=False):
        at_budget = ends[ends["budget"] == keys[-1]]
        random, oracle = (at_budget[at_budget["policy"] == end] for end in ("random", "oracle"))
        ours, low, high = (sign * _values(part, measure) for part in (group, random, oracle))
        rows.append([*keys, *fraction_of_the_way(ours, low, high)])
    return pd.DataFrame(rows, columns=[*KEYS, "mean", "low", "high"])


def paired(texts: pd.DataFrame, measure: str, ours: Form, theirs: Form) -> pd.DataFrame:
    """Paired difference over texts, ours − theirs, by budget: columns budget, mean, low, high (95 % bootstrap).

    Each of the two is named by policy, selection and start.
    """
    wide = texts.pivot_table(index="text", columns=KEYS, values=measure, sort=False)
    budgets = sorted(texts["budget"].unique())
    rows = [[b, *mean_interval((wide[(*ours, b)] - wide[(*theirs, b)]).to_numpy())] for b in budgets]
    return pd.DataFrame(rows, columns=["budget", "mean", "low", "high"])


def check_oracle(texts: pd.DataFrame) -> None:
    """Assert that no head-shared set keeps more of a text's held-out mass than the mass oracle's.

    Raises:
        AssertionError: one does, so something is computed wrongly.
    """
    shared = texts[texts["selection"] == "head-shared"]
    best = shared[(shared["policy"] == "oracle")].set_index(["text", "budget"])["share_kept"]
    beaten = shared["share_kept"].to_numpy() - best.loc[list(zip(shared["text"], shared["budget"], strict=True))]
    assert beaten.max() <= 1e-9, f"a set keeps {beaten.max():.2e} more than the mass oracle"


def is_error(measure: str) -> bool:
    """Whether less of this measure is better, as of an error; of a share, more is."""
    return measure.startswith("error")


def _values(rows: pd.DataFrame, measure: str) -> npt.NDArray[np.float64]:
    """One value a text, the texts in the same order for every policy."""
    return rows.sort_values("text")[measure].to_numpy()


def shared_one_shot(policy: str) -> Form:
    """The name of a policy's plain form in :func:`paired`."""
    return policy, "head-shared", "one-shot"
