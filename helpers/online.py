"""Online eviction, as H2O's paper has it: one token leaves at each step, and what left collects nothing more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from helpers.errors import InputError
from helpers.scores import Scores, uniform_causal_null

ONLINE_SCORES = ("sum", "mean", "calibrated")
BLOCK_BYTES = 2**28  # logits held at once
SMALLEST = 1e-200  # of a cache's share of all exponentials


class _Caches:
    """The tokens that K caches hold, for G groups of heads that choose alike, and what these have collected.

    All arrays are [G, K, L]. The groups of a cache hold equally many tokens.
    """

    def __init__(self, n_groups: int, capacities: list[int], n_tokens: int) -> None:
        shape = (n_groups, len(capacities), n_tokens)
        self.capacity = np.array(capacities)
        self.n_held = np.zeros(len(capacities), dtype=np.int64)
        self.held, self.total, self.count, self.null = (np.zeros(shape) for _ in range(4))
        self.evicted_at: npt.NDArray[np.int64] = np.full(shape, n_tokens)

    def observe(self, step: int, logits: npt.NDArray[np.float64]) -> None:
        """Take up token ``step``, and add its query's softmax over what is held; ``logits`` [G, heads, step + 1]."""
        self.held[..., step] = 1
        self.n_held += 1
        held = self.held[..., : step + 1]
        # one exponential serves all caches: each divides by the sum over its own tokens
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        sums = e @ held.transpose(0, 2, 1)  # [G, heads, K]
        if sums.min() > SMALLEST:
            p = held * ((1 / sums).transpose(0, 2, 1) @ e)
        else:  # what a cache holds has nearly nothing of all: its own maximum has to be taken out
            x = np.where(held[:, None] > 0, logits[:, :, None], -np.inf)  # [G, heads, K, step + 1]
            x = np.exp(x - x.max(axis=-1, keepdims=True))
            p = (x / x.sum(axis=-1, keepdims=True)).sum(axis=1)
        self.total[..., : step + 1] += p
        self.count[..., : step + 1] += held
        self.null[..., : step + 1] += held * (logits.shape[1] / self.n_held[:, None])

    def evict(self, step: int, score: str, n_sink: int, n_recent: int) -> None:
        """Let the lowest of the unprotected go until no more are held than allowed; the higher index among equals."""
        groups = np.arange(self.held.shape[0])[:, None]
        unprotected = slice(n_sink, max(n_sink, step + 1 - n_recent))
        while len(full := np.flatnonzero(self.n_held > self.capacity)):
            held = self.held[:, full, unprotected] > 0
            value: Scores = np.full(held.shape, np.inf)
            divisor = {"sum": self.held, "mean": self.count, "calibrated": self.null}[score][:, full, unprotected]
            np.divide(self.total[:, full, unprotected], divisor, out=value, where=held)
            lowest = n_sink + value.shape[-1] - 1 - np.argmin(value[..., ::-1], axis=-1)  # [G, caches]
            self.held[groups, full, lowest] = 0
            self.evicted_at[groups, full, lowest] = step
            self.n_held[full] -= 1


def online_eviction(
    query: torch.Tensor, key: torch.Tensor, scale: float, n_sink: int, n_recent: int, budgets: list[int],
    *, score: str = "sum", n_groups: int = 1, prompt_mass: torch.Tensor | None = None,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Evict step by step while L tokens are read, and return the step after which each token was gone: [budgets, G, L].

    A token that stays has L. At step t, each head's softmax runs over the surviving keys and the new one;
    ``total_j += p``, ``count_j += 1``, ``null_j += heads ÷ keys held`` for these, never rescaled. Then, while more than
    ``n_sink + n_recent + budget`` keys are held, the unprotected one of the lowest score goes: ``sum`` is the total
    (H2O's Algorithm 1, arXiv:2306.14048), ``mean`` total ÷ count, ``calibrated`` total ÷ null.

    Args:
        query: [H, L, width].
        key: [KV, L, width]; neighbouring query heads share a key head.
        scale: what logits are multiplied with.
        n_sink: first tokens that never leave.
        n_recent: last tokens that can't leave yet.
        budgets: further tokens that can be held; one result each.
        score: one of ``ONLINE_SCORES``.
        n_groups: groups of neighbouring heads that choose for themselves; 1 is head-shared.
        prompt_mass: [H, P], the full cache's mass: the first P tokens were read without eviction
            (``start="after-prompt"``). None: ``start="first-token"``, as in the paper.

    Raises:
        InputError: another score, a negative count, or groups that don't divide the heads.
    """
    n_heads, n_tokens, _ = query.shape
    if score not in ONLINE_SCORES:
        raise InputError(f"Online eviction has the scores {', '.join(ONLINE_SCORES)}, not '{score}'.")
    if min(n_sink, n_recent, *budgets) < 0:
        raise InputError("n_sink, n_recent and budgets must be at least 0.")
    if n_groups < 1 or n_heads % n_groups:
        raise InputError(f"{n_heads} heads don't make {n_groups} equal groups.")
    caches = _Caches(n_groups, [n_sink + n_recent + budget for budget in budgets], n_tokens)
    first = 0
    if prompt_mass is not None:
        first = prompt_mass.shape[-1]
        mass = prompt_mass.double().cpu().numpy().reshape(n_groups, -1, first).sum(axis=1)
        caches.n_held[:] = first
        caches.held[..., :first] = 1
        caches.total[..., :first] = mass[:, None]
        caches.count[..., :first] = np.arange(first, 0, -1)
        caches.null[..., :first] = uniform_causal_null(first, n_heads // n_groups)
        caches.evict(first - 1, score, n_sink, n_recent)
    grouped_key = key.repeat_interleave(n_heads // len(key), dim=0).float()
    rows = max(1, BLOCK_BYTES // (4 * n_heads * n_tokens))
    for start in range(first, n_tokens, rows):
        end = min(start + rows, n_tokens)
        block = scale * query[:, start:end].float() @ grouped_key[:, :end].transpose(1, 2)
        logits = block.transpose(0, 1).reshape(end - start, n_groups, n_heads // n_groups, end).cpu().numpy()
        for step in range(start, end):
            caches.observe(step, logits[step - start, ..., : step + 1].astype(np.float64))
            caches.evict(step, score, n_sink, n_recent)
    return caches.evicted_at.transpose(1, 0, 2)
