"""Policies compared on one layer, and what is said of them: against plain loops over the judged rows."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from helpers.capture import prompt_statistics
from helpers.checkpoint import Checkpoint
from helpers.comparison import (
    KEYS,
    MEASURES,
    by_text,
    check_comparison,
    check_oracle,
    compare,
    curve_budgets,
    of_the_way,
    over_texts,
    paired,
    shared_one_shot,
)
from helpers.errors import InputError
from helpers.heavy_tails import beyond_random, heavy_tails, random_scores
from helpers.inputs import prepare_inputs, random_embeddings
from helpers.layer import load_attention, random_attention
from helpers.parameters import Parameters
from helpers.policies import evict
from helpers.verdict import intervals, leaders, verdicts, who_leads, who_leads_title

SMALL = {"seq_len": 40, "continuation": 8, "n_sink": 2, "n_recent": 6, "budgets": [2, 5, 9], "n_seeds": 3}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, mla_model: torch.nn.Module) -> pd.DataFrame:
    """Eight draws of random embeddings on one small MLA layer."""
    from conftest import stored_tensors, write_checkpoint

    folder = write_checkpoint(tmp_path_factory.mktemp("compared") / "kimi", mla_model.config, stored_tensors(mla_model))
    parameters = Parameters.check(SMALL | {"checkpoint": str(folder), "dtype": "float32"})
    layer = load_attention(Checkpoint.open(folder), 1, torch.float32)
    tables = []
    for seed in range(8):
        states = random_embeddings(48, layer.config.hidden_size, 3.0, seed, torch.float32)
        table = compare(layer, states, prompt_statistics(layer, states, 40), parameters)
        tables.append(table.assign(text=f"draw {seed}"))
    return pd.concat(tables)


def test_every_policy_is_judged_at_every_budget_with_exact_counts(judged: pd.DataFrame) -> None:
    one = judged[judged["text"] == "draw 0"]
    # six scores shared and per head, recency, earliest, oracle shared and per head, 3 seeds, online 3 + 1
    assert len(one) == 3 * (6 * 2 + 2 + 2 + 3 + 4)
    assert (one["kept"] == one["budget"] + 8).all()
    assert (one[["share_kept", "share_kept_worst_head"]] <= 1).all(axis=None)
    assert (one["share_kept_worst_head"] <= one["share_kept"] + 1e-12).all()


def test_the_fraction_of_the_way_is_that_of_the_means_over_texts(judged: pd.DataFrame) -> None:
    texts = by_text(judged)
    found = of_the_way(texts, "share_kept").set_index(KEYS)["mean"]
    shared = judged[(judged["start"] == "one-shot") & (judged["selection"] == "head-shared")]
    means = shared.groupby(["policy", "budget"])["share_kept"].mean()  # every text has as many seeds
    for policy, budget in means.index:
        if policy in ("random", "oracle"):
            continue
        way = (means[policy, budget] - means["random", budget]) / (means["oracle", budget] - means["random", budget])
        assert found[policy, "head-shared", "one-shot", budget] == pytest.approx(way)


def test_the_oracles_rank_by_the_continuations_mass_and_random_seeds_differ(judged: pd.DataFrame) -> None:
    one_shot = judged[judged["start"] == "one-shot"]
    for _, rows in one_shot.groupby(["text", "selection", "budget"]):
        assert rows["share_kept"].max() == rows[rows["policy"] == "oracle"]["share_kept"].item()
    for _, rows in one_shot[one_shot["policy"] == "random"].groupby(["text", "budget"]):
        assert list(rows["seed"]) == [0, 1, 2]
        assert rows["share_kept"].nunique() == 3


def test_means_and_paired_differences_are_those_of_plain_loops(judged: pd.DataFrame) -> None:
    texts = by_text(judged)

    def value(policy: str, text: str, budget: int) -> float:
        rows = judged[(judged["text"] == text) & (judged["budget"] == budget) & (judged["policy"] == policy)]
        rows = rows[(rows["selection"] == "head-shared") & (rows["start"] == "one-shot")]
        return statistics.fmean(rows["share_kept"])

    names = sorted(judged["text"].unique())
    means = over_texts(texts, "share_kept")
    for budget in SMALL["budgets"]:
        (mean,) = means.query(
            "policy == 'random' and selection == 'head-shared' and start == 'one-shot' and budget == @budget"
        )["mean"]
        assert mean == pytest.approx(statistics.fmean(value("random", name, budget) for name in names))
        found = paired(texts, "share_kept", shared_one_shot("sum"), shared_one_shot("recency")).set_index("budget")
        differences = [value("sum", name, budget) - value("recency", name, budget) for name in names]
        assert found.loc[budget, "mean"] == pytest.approx(statistics.fmean(differences))
        assert min(differences) <= found.loc[budget, "low"] <= found.loc[budget, "high"] <= max(differences)


def test_the_oracle_is_checked_and_a_set_that_beats_it_is_noticed(judged: pd.DataFrame) -> None:
    texts = by_text(judged)
    check_oracle(texts)
    texts.loc[texts["policy"] == "mean", "share_kept"] = 1.1
    with pytest.raises(AssertionError, match="more than the mass oracle"):
        check_oracle(texts)


def made_up(shares: dict[str, list[float]]) -> pd.DataFrame:
    """``by_text``'s table of one budget: policy -> a share for each text."""
    return pd.DataFrame(
        {"text": str(i), "policy": policy, "selection": "head-shared", "start": "one-shot", "budget": 8}
        | dict.fromkeys(MEASURES, share)
        for policy, values in shares.items()
        for i, share in enumerate(values)
    )


def with_papers_form(shares: dict[str, list[float]]) -> pd.DataFrame:
    """And ``sum`` online and for each head, with the same shares."""
    paper = made_up({"sum": shares["sum"]}).assign(selection="per-head", start="first-token")
    return pd.concat([made_up(shares), paper])


def test_the_verdict_says_when_h2o_does_not_beat_recency() -> None:
    low, high = [0.2, 0.3, 0.25, 0.21] * 2, [0.5, 0.6, 0.52, 0.55] * 2
    others = {"random": low, "oracle": [0.7] * 8}
    worse, better = (
        with_papers_form({"sum": low, "recency": high} | others),
        with_papers_form({"sum": high, "recency": low} | others),
    )
    found = verdicts(worse, "share_kept")
    assert found[0].startswith("By held-out mass, H2O (`sum`) does not beat recency at any budget (1 clearly worse, 0")
    assert "By held-out mass, H2O (`sum`) beats recency at every budget (the" in verdicts(better, "share_kept")[0]
    # of errors, the smaller one is better
    assert "By output error, H2O (`sum`) beats recency at every budget (the" in verdicts(worse, "error_after")[0]
    assert "does not beat recency at any budget (1 clearly worse" in verdicts(better, "error_after")[0]
    tied = with_papers_form({"sum": [0.2, 0.4] * 4, "recency": [0.4, 0.2] * 4} | others)
    assert "at any budget (0 clearly worse, 1 with an interval that holds 0" in verdicts(tied, "share_kept")[0]
    assert "beats chance (`random`) at every budget" in verdicts(better, "share_kept")[1]
    assert "less the mass oracle: from -15.7 to -15.7 points" in verdicts(better, "share_kept")[-1]


def test_the_papers_own_form_is_judged_apart() -> None:
    shared = made_up({"sum": [0.5, 0.6] * 4, "recency": [0.3, 0.4] * 4, "random": [0.1] * 8, "oracle": [0.9] * 8})
    paper = made_up({"sum": [0.2, 0.3] * 4}).assign(selection="per-head", start="first-token")
    found = verdicts(pd.concat([shared, paper]), "share_kept")
    assert "H2O (`sum`) beats recency" in found[0]
    assert any("H2O as in its paper (`sum` per head, online) does not beat recency" in sentence for sentence in found)


def test_few_texts_or_no_h2o_give_no_verdict() -> None:
    ends = {"random": [0.1] * 7, "oracle": [0.9] * 7}
    (few,) = verdicts(made_up({"sum": [0.2] * 7, "recency": [0.4] * 7} | ends), "share_kept")
    assert few.startswith("Fewer than 8 texts give no interval")
    (none,) = verdicts(made_up(ends), "share_kept")
    assert none == "H2O (`sum`) wasn't among the compared policies."
    assert who_leads(made_up(ends), "share_kept", "mass") == "Fewer than two scores were compared: none leads."


def test_the_leader_is_the_best_score_and_a_lead_within_chance_is_called_none() -> None:
    texts = made_up({"sum": [0.2, 0.4, 0.2, 0.5] * 2, "mean": [0.4, 0.2, 0.4, 0.2] * 2, "oracle": [0.9] * 8})
    assert list(leaders(texts)["best"]) == ["sum"]
    assert list(leaders(texts, "error_after")["best"]) == ["mean"]
    assert "no clear lead" in who_leads(texts, "share_kept", "mass")
    assert who_leads_title(texts, "share_kept", "Most mass") == "Most mass: no score clearly leads"
    clear = made_up({"sum": [0.2, 0.3, 0.2, 0.3] * 2, "mean": [0.4, 0.6, 0.4, 0.5] * 2})
    assert "at budget 8 `mean` (against `sum`" in who_leads(clear, "share_kept", "mass")
    assert "no clear lead" not in who_leads(clear, "share_kept", "mass")


def test_a_title_names_who_clearly_leads_and_where() -> None:
    first = made_up({"sum": [0.2, 0.3] * 4, "mean": [0.4, 0.5] * 4})
    same, other = first.assign(budget=16), made_up({"sum": [0.4, 0.5] * 4, "mean": [0.2, 0.3] * 4}).assign(budget=32)
    tie = made_up({"sum": [0.4, 0.5] * 4, "mean": [0.5, 0.4] * 4}).assign(budget=64)
    assert who_leads_title(pd.concat([first, same]), "share_kept", "Most mass") == "Most mass: mean at every budget"
    found = who_leads_title(pd.concat([first, same, other, tie]), "share_kept", "Most mass")
    assert found == "Most mass: mean at 2, sum at 1 of 4 budgets"
    assert (
        who_leads_title(made_up({"sum": [0.2] * 8}), "share_kept", "Most mass") == "Most mass: no score clearly leads"
    )


def test_a_table_names_every_form_of_a_policy_and_shows_no_scale_as_a_dash() -> None:
    texts = made_up({"random": [0.2, 0.3] * 4, "oracle": [0.4, 0.5] * 4, "sum": [0.3, 0.4] * 4})
    forms = [texts, texts.assign(selection="per-head"), texts.assign(start="first-token")]
    found = intervals(over_texts(pd.concat(forms), "share_kept")).set_index("policy")["budget 8"]
    assert {"sum", "sum, per head", "sum, online"} <= set(found.index)
    assert found["sum"].startswith("35.0 [3")
    assert list(intervals(of_the_way(texts, "share_kept"))["budget 8"]) == ["50.0 [50.0, 50.0]"]
    # by error, this oracle is worse than random: nothing lies between them
    assert list(intervals(of_the_way(texts, "error_after"))["budget 8"]) == ["–"]


def test_budgets_run_from_a_thirty_second_to_half_of_the_middle() -> None:
    assert curve_budgets(Parameters.check({"seq_len": 36 + 640})) == [20, 40, 80, 160, 240, 320]
    assert curve_budgets(Parameters.check({"budgets": [9, 3]})) == [3, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"continuation": 0}, "set continuation to at least 1"),
        ({"seq_len": 36}, "lie 0 tokens, and a budget of 1 keeps them all: raise seq_len, or lower n_sink or n_"),
        (
            {"budgets": [4, 220]},
            "lie 220 tokens, and a budget of 220 keeps them all: raise seq_len, or take budgets below 220",
        ),
    ],
)
def test_a_comparison_of_nothing_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_comparison(Parameters.check(changes))


# -- several inputs


def test_draws_are_numbered_by_seed(mla_checkpoint: Path) -> None:
    parameters = Parameters.check({"checkpoint": str(mla_checkpoint), "input": "random", "n_texts": 3, "seed": 7})
    inputs = prepare_inputs(parameters, Checkpoint.open(mla_checkpoint), torch.float32, "cpu")
    for i, given in enumerate(inputs):
        assert torch.equal(given.hidden_states, random_embeddings(320, 64, 1.0, 7 + i, torch.float32))


# -- random weights


def test_random_weights_have_the_stated_scale_and_leave_the_layer_alone(mla_checkpoint: Path) -> None:
    layer = load_attention(Checkpoint.open(mla_checkpoint), 0, torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.module.state_dict().items()}
    drawn = random_attention(layer, seed=1)
    for name, tensor in drawn.module.state_dict().items():
        if tensor.ndim == 1:
            assert (tensor == 1).all(), name
        else:
            assert float(tensor.std()) == pytest.approx(layer.config.initializer_range, rel=0.15), name
        assert torch.equal(layer.module.state_dict()[name], before[name])
    again = random_attention(layer, seed=1).module.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in drawn.module.state_dict().items())


def test_the_band_of_random_weights_is_their_smallest_and_largest(mla_checkpoint: Path) -> None:
    parameters = Parameters.check(SMALL | {"budget": 6})
    layer = load_attention(Checkpoint.open(mla_checkpoint), 0, torch.float32)
    states = {"noise": random_embeddings(48, 64, 1.0, 0, torch.float32)}
    random = random_scores(layer, states, parameters)
    assert len(random["noise"]) == 3
    score = np.linspace(1, 3, 40)
    table = heavy_tails({"noise": score}, random, layer.n_heads, parameters).set_index("statistic")
    ratios = []
    for drawn in random["noise"]:
        assert drawn.sum() == pytest.approx(layer.n_heads * 40, rel=1e-5)
        category = np.array(evict(drawn, 2, 6, 6))
        ratios.append(drawn[category == "heavy"].mean() / drawn[category == "evicted"].mean())
    row = table.loc["heavy_to_evicted"]
    assert (row["random_low"], row["random_high"]) == pytest.approx((min(ratios), max(ratios)))
    assert table.loc["overlap_with_null", "null"] == 1
    assert table.loc["overlap_with_null", "chance"] == pytest.approx(6 / 32)
    assert math.isnan(table.loc["gini", "chance"])
    assert "rank correlation with position" in beyond_random(table.reset_index(), "noise", 3)
