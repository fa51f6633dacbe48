"""Online eviction against a plain loop that follows the definition, one token and one head at a time."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.errors import InputError
from helpers.online import LITTLE_WORK, ONLINE_SCORES, _one_thread_for, online_eviction
from helpers.policies import kept_tokens
from helpers.scores import uniform_causal_null


def plain_online(
    q: np.ndarray, k: np.ndarray, scale: float, n_sink: int, n_recent: int, budget: int, score: str, prompt: int = 0
) -> list[set[int]]:
    """Return the kept set after every step, for heads that choose together: q and k are [H, L, width].

    The first ``prompt`` steps only observe.
    """
    n_heads, n_tokens, _ = q.shape
    held: list[int] = []
    total, count, null = (dict.fromkeys(range(n_tokens), 0.0) for _ in range(3))
    after = []
    for t in range(n_tokens):
        held.append(t)
        for h in range(n_heads):
            logits = {j: scale * math.fsum((q[h, t].astype(float) * k[h, j]).tolist()) for j in held}
            most = max(logits.values())
            denominator = math.fsum(math.exp(x - most) for x in logits.values())
            for j in held:
                total[j] += math.exp(logits[j] - most) / denominator
                null[j] += 1 / len(held)
        for j in held:
            count[j] += 1
        while t >= prompt - 1 and len(held) > n_sink + n_recent + budget:
            rank = {"sum": total, "mean": {j: total[j] / count[j] for j in held},
                    "calibrated": {j: total[j] / null[j] for j in held}}[score]  # fmt: skip
            unprotected = [j for j in held if j >= n_sink and j <= t - n_recent]
            held.remove(min(unprotected, key=lambda j: (rank[j], -j)))
        after.append(set(held))
    return after


def sets(evicted_at: np.ndarray) -> list[set[int]]:
    return [{j for j in range(t + 1) if evicted_at[j] > t} for t in range(len(evicted_at))]


def draw(seed: int, n_heads: int, kv_heads: int, n: int, sharp: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n_heads, n, 4, generator=generator) * sharp
    return q, torch.randn(kv_heads, n, 4, generator=generator)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(1, 26), st.integers(0, 4), st.integers(0, 6), st.integers(0, 8),
    st.sampled_from(ONLINE_SCORES), st.sampled_from([0.0, 0.5, 3.0]),
)  # fmt: skip
def test_every_kept_set_equals_the_plain_loops(
    seed: int, n: int, n_sink: int, n_recent: int, budget: int, score: str, sharp: float
) -> None:
    q, k = draw(seed, 2, 2, n, sharp)
    found = online_eviction(
        q, k, 0.5, n_sink, n_recent, [budget + 2, budget], choices=[(name, 1) for name in ONLINE_SCORES]
    )[score, 1]
    for i, size in enumerate((budget + 2, budget)):
        if sharp:  # even attention is a tie of sums that depend on the order of adding
            assert sets(found[i, 0]) == plain_online(q.numpy(), k.numpy(), 0.5, n_sink, n_recent, size, score)
        assert all(len(kept) == min(t + 1, n_sink + n_recent + size) for t, kept in enumerate(sets(found[i, 0])))


@pytest.mark.parametrize("score", ONLINE_SCORES)
def test_after_a_prompt_it_goes_on_from_the_full_caches_mass(score: str) -> None:
    q, k = draw(5, 3, 3, 40)
    logits = 0.5 * q.double() @ k.double().transpose(1, 2)
    p = torch.softmax(logits.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf), dim=-1)
    mass = p[:, :24, :24].sum(dim=1)
    found = online_eviction(q, k, 0.5, 2, 4, [6], choices=[(score, 1)], prompt_mass=mass)[score, 1][0, 0]
    assert sets(found)[23:] == plain_online(q.numpy(), k.numpy(), 0.5, 2, 4, 6, score, prompt=24)[23:]
    # its first eviction is one-shot's
    divisor = {"sum": 1.0, "mean": np.arange(24, 0, -1), "calibrated": uniform_causal_null(24, 3)}[score]
    one_shot = kept_tokens(mass.sum(dim=0).numpy() / divisor, 2, 4, 6)
    assert sets(found)[23] == set(np.flatnonzero(one_shot))


def test_groups_choose_as_each_would_alone() -> None:
    q, k = draw(3, 4, 2, 30)  # grouped queries: two query heads share a key head
    found = online_eviction(q, k, 0.7, 1, 3, [5], choices=[("sum", 1), ("sum", 2)])["sum", 2][0]
    expanded = k.repeat_interleave(2, dim=0).numpy()
    for group in range(2):
        heads = slice(2 * group, 2 * group + 2)
        assert sets(found[group]) == plain_online(q[heads].numpy(), expanded[heads], 0.7, 1, 3, 5, "sum")


def test_attention_so_sharp_that_what_is_left_had_nothing_is_still_a_softmax() -> None:
    """Logits of hundreds: what survives may have had e^-700 of all, and shares all of the next query's attention."""
    q, k = draw(7, 2, 2, 40, sharp=400.0)
    found = online_eviction(q, k, 1.0, 1, 2, [3])["sum", 1][0, 0]
    assert sets(found) == plain_online(q.numpy(), k.numpy(), 1.0, 1, 2, 3, "sum")


@pytest.mark.parametrize(("elements", "threads"), [(LITTLE_WORK - 1, 1), (LITTLE_WORK, 2)])
def test_short_steps_run_in_one_thread_and_the_users_setting_comes_back(elements: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with contextlib.suppress(ZeroDivisionError), _one_thread_for(elements):
            inside = torch.get_num_threads()
            raise ZeroDivisionError
        assert (inside, torch.get_num_threads()) == (threads, 2)
    finally:
        torch.set_num_threads(before)


def test_a_cache_that_holds_all_evicts_nothing() -> None:
    q, k = draw(0, 2, 2, 12)
    assert (online_eviction(q, k, 1.0, 4, 4, [4])["sum", 1] == 12).all()


def test_a_new_token_lives_through_its_whole_window() -> None:
    """Entering with little mass, it would be the first to go, and the cache would freeze on the prompt."""
    q, k = draw(1, 2, 2, 60)
    evicted_at = online_eviction(q, k, 1.0, 2, 7, [3])["sum", 1][0, 0]
    gone = np.flatnonzero(evicted_at < 60)
    assert (evicted_at[gone] - gone >= 7).all()
    assert len(gone) == 60 - 12


def test_even_attention_by_sum_keeps_the_earliest_as_ties_go_to_the_lower_index() -> None:
    q, k = torch.zeros(1, 20, 4), torch.zeros(1, 20, 4)
    assert sets(online_eviction(q, k, 1.0, 0, 0, [4])["sum", 1][0, 0])[-1] == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": [("sum", 1), ("window", 1)]}, "scores sum, mean, calibrated, not 'window'"),
        ({"choices": [("sum", 3)]}, "2 heads don't make 3 equal groups"),
        ({"n_sink": -1}, "must be at least 0"),
        ({"budgets": [4, -1]}, "must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    q, k = draw(0, 2, 2, 5)
    with pytest.raises(InputError, match=message):
        online_eviction(**{"query": q, "key": k, "scale": 1.0, "n_sink": 0, "n_recent": 0, "budgets": [1]} | changes)
