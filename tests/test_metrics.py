"""What an eviction costs, against transformers' own eager attention with the evicted tokens masked, in float64."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.capture import attention_implementation, capture_attention
from helpers.checkpoint import Checkpoint
from helpers.errors import InputError
from helpers.inputs import random_embeddings
from helpers.layer import AttentionLayer, load_attention
from helpers.metrics import (
    FEWEST,
    cache_bytes,
    fraction_of_the_way,
    mean_interval,
    output_errors,
    share_of_kept_mass,
)
from helpers.policies import control_score, kept_tokens
from helpers.projections import queries_keys_values

PROMPT, CONTINUATION = 40, 9


@pytest.fixture(params=["mla", "gqa"])
def layer(request: pytest.FixtureRequest, mla_checkpoint: Path, llama_checkpoint: Path) -> AttentionLayer:
    folder = mla_checkpoint if request.param == "mla" else llama_checkpoint
    return load_attention(Checkpoint.open(folder), 1, torch.float32)


@pytest.fixture
def hidden_states(layer: AttentionLayer) -> torch.Tensor:
    return random_embeddings(PROMPT + CONTINUATION, layer.config.hidden_size, 3.0, 0, torch.float32)


def masked_attention(layer: AttentionLayer, hidden_states: torch.Tensor, kept: np.ndarray) -> dict[str, torch.Tensor]:
    """transformers' eager attention with evicted prompt tokens masked for the continuation: before and after o_proj."""
    n_tokens = hidden_states.shape[1]
    mask = torch.full((1, layer.n_heads, n_tokens, n_tokens), -math.inf, dtype=torch.float64).triu(1)
    by_head = np.repeat(np.atleast_2d(kept), layer.n_heads // len(np.atleast_2d(kept)), axis=0)
    for h, j in itertools.product(range(layer.n_heads), range(PROMPT)):
        if not by_head[h, j]:
            mask[0, h, PROMPT:, j] = -math.inf
    module = layer.module.double()
    rotary = tuple(part.double() for part in layer.position_embeddings(hidden_states))
    seen: dict[str, torch.Tensor] = {}
    hook = module.o_proj.register_forward_pre_hook(lambda _, args: seen.update(before=args[0][0, PROMPT:]))
    with torch.no_grad(), attention_implementation(module, "eager"):
        seen["after"] = module(hidden_states.double(), rotary, mask)[0][0, PROMPT:]
    hook.remove()
    module.float()
    return seen


def test_output_error_equals_eager_attention_with_the_evicted_masked(
    layer: AttentionLayer, hidden_states: torch.Tensor
) -> None:
    query, key, value = queries_keys_values(layer, hidden_states)
    rng = np.random.default_rng(0)
    score, by_head = rng.random(PROMPT), rng.random((layer.n_heads, PROMPT))
    kept = [
        *(kept_tokens(score, 2, 5, budget) for budget in (3, 8, 20)),  # nested, as of one score
        *(kept_tokens(by_head, 2, 5, budget) for budget in (3, 8)),
        kept_tokens(rng.random((len(key), PROMPT)), 0, 0, 20),
        np.zeros(PROMPT, dtype=bool),
    ]
    errors = output_errors(layer, query[:, PROMPT:], key, value, kept)
    full = masked_attention(layer, hidden_states, np.ones(PROMPT, dtype=bool))
    for i, one in enumerate(kept):
        evicted = masked_attention(layer, hidden_states, one)
        for part, found in (("before", errors.before), ("after", errors.after)):
            truth = float((evicted[part] - full[part]).norm() / full[part].norm())
            assert truth > 0.01
            assert found[i] == pytest.approx(truth, rel=2e-4), part


def test_a_set_of_all_tokens_costs_nothing(layer: AttentionLayer, hidden_states: torch.Tensor) -> None:
    query, key, value = queries_keys_values(layer, hidden_states)
    errors = output_errors(layer, query[:, PROMPT:], key, value, [np.ones(PROMPT, dtype=bool)])
    assert max(errors.before + errors.after) < 1e-5


def test_one_head_at_a_time_gives_the_same(
    layer: AttentionLayer, hidden_states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = queries_keys_values(layer, hidden_states)
    kept = [kept_tokens(np.random.default_rng(1).random((layer.n_heads, PROMPT)), 1, 2, 6)]
    together = output_errors(layer, query[:, PROMPT:], key, value, kept)
    monkeypatch.setattr("helpers.metrics.BLOCK_BYTES", 1)
    alone = output_errors(layer, query[:, PROMPT:], key, value, kept)
    assert alone.before == pytest.approx(together.before, rel=1e-5)
    assert alone.after == pytest.approx(together.after, rel=1e-5)


def test_attention_so_sharp_that_what_stays_had_almost_nothing_is_still_a_softmax(layer: AttentionLayer) -> None:
    """The kept keys' weights were e^-200 of all: in float32 they would be zero, and their quotient NaN."""
    heads = layer.n_heads
    query, key = torch.ones(heads, 1, 1), torch.tensor([0.0, 200.0, 0.0]).view(1, 3, 1).repeat(heads, 1, 1)
    value = torch.arange(3.0).view(1, 3, 1).repeat(heads, 1, layer.module.o_proj.in_features // heads)
    layer.module.scaling = 1.0
    errors = output_errors(layer, query, key, value, [np.array([True, False])])
    assert errors.before == pytest.approx([0.0], abs=1e-6)  # (0 + 2) / 2 is the 1 of the token that left


def test_share_of_kept_mass_is_the_continuations_own(layer: AttentionLayer, hidden_states: torch.Tensor) -> None:
    mass = capture_attention(layer, hidden_states, PROMPT).mass_continuation[0]
    query, key, _ = (x.double() for x in queries_keys_values(layer, hidden_states))
    key = key.repeat_interleave(layer.n_heads // len(key), dim=0)
    kept = kept_tokens(np.random.default_rng(0).random((layer.n_heads, PROMPT)), 2, 5, 8)
    on_kept, on_all = np.zeros(layer.n_heads), np.zeros(layer.n_heads)
    for h, i in itertools.product(range(layer.n_heads), range(PROMPT, PROMPT + CONTINUATION)):
        p = torch.softmax(layer.module.scaling * key[h, : i + 1] @ query[h, i], dim=0).numpy()[:PROMPT]
        on_kept[h] += p[kept[h]].sum()
        on_all[h] += p.sum()
    pooled, worst = share_of_kept_mass(mass, kept)
    assert pooled == pytest.approx(on_kept.sum() / on_all.sum(), rel=1e-5)
    assert worst == pytest.approx((on_kept / on_all).min(), rel=1e-5)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(0, 3), st.integers(0, 12))
def test_no_head_shared_set_keeps_more_than_the_oracles(seed: int, n_sink: int, n_recent: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    mass = torch.from_numpy(rng.random((3, 14)))
    best, _ = share_of_kept_mass(mass, kept_tokens(mass.sum(dim=0).numpy(), n_sink, n_recent, budget))
    scores = [rng.random(14), control_score("recency", 14), control_score("earliest", 14)]
    assert all(share_of_kept_mass(mass, kept_tokens(s, n_sink, n_recent, budget))[0] <= best + 1e-12 for s in scores)


def test_bytes_of_the_cache_are_those_of_transformers_cache(layer: AttentionLayer) -> None:
    """K2.6's figures are in the next test; here, that a token's bytes are what its tensors hold."""
    config, module = layer.config, layer.module
    found = cache_bytes(layer, 10)
    if "latent" in found:
        assert found["latent"] == 10 * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
        heads = config.num_attention_heads
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        assert found["expanded"] == 10 * heads * widths * 4
    else:
        assert found == {"expanded": 10 * 4 * (module.k_proj.out_features + module.v_proj.out_features)}


def test_fraction_of_the_way_is_zero_at_random_one_at_the_oracle_and_not_cut() -> None:
    random, oracle = np.array([0.2, 0.25, 0.3, 0.22] * 2), np.array([0.6, 0.62, 0.7, 0.66] * 2)
    assert fraction_of_the_way(random, random, oracle) == (0, 0, 0)
    assert fraction_of_the_way(oracle, random, oracle) == pytest.approx((1, 1, 1))
    # on the line between the ends in every document, whatever is drawn
    assert fraction_of_the_way(random - 0.5 * (oracle - random), random, oracle) == pytest.approx((-0.5, -0.5, -0.5))
    middle, low, high = fraction_of_the_way(np.array([0.3, 0.5, 0.4, 0.6] * 2), random, oracle)
    assert middle == pytest.approx((0.45 - 0.2425) / (0.645 - 0.2425))
    assert low < middle < high


@pytest.mark.parametrize(
    ("random", "oracle"),
    [
        ([0.2, 0.3] * 4, [0.3, 0.2] * 4),  # not told apart
        ([0.2] * 8, [0.2] * 8),
        ([0.4] * 8, [0.3, 0.2] * 4),  # the oracle is worse
        ([0.2] * 7, [0.9] * 7),  # too few
    ],
)
def test_an_oracle_that_is_not_shown_to_be_better_is_no_scale(random: list[float], oracle: list[float]) -> None:
    assert np.isnan(fraction_of_the_way(np.full(len(random), 0.25), np.array(random), np.array(oracle))).all()


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    found = [mean_interval(rng.normal(1.0, 2.0, size=24)) for _ in range(200)]
    assert 0.88 <= np.mean([low <= 1.0 <= high for _, low, high in found]) <= 0.98
    assert all(low <= mean <= high for mean, low, high in found)


@pytest.mark.parametrize("n", [1, 7])
def test_few_documents_have_no_interval(n: int) -> None:
    mean, low, high = mean_interval(np.linspace(0.1, 0.3, n) if n > 1 else np.array([0.2]))
    assert mean == pytest.approx(0.2)
    assert math.isnan(low)
    assert math.isnan(high)


def test_a_percentile_interval_of_the_fewest_documents_covers_as_often_as_is_said() -> None:
    rng = np.random.default_rng(1)
    found = [mean_interval(rng.normal(size=FEWEST)) for _ in range(300)]
    assert 0.83 <= np.mean([low <= 0 <= high for _, low, high in found]) <= 0.95


def test_more_than_memory_holds_is_refused_with_numbers(
    layer: AttentionLayer, hidden_states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helpers.projections.free_bytes", lambda _: 1000)
    with pytest.raises(InputError, match=r"Queries, keys and values of 49 tokens take about .* lower seq_len"):
        queries_keys_values(layer, hidden_states)
