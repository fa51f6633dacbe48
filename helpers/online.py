"""Online eviction, as H2O's paper has it: one token leaves at each step, and what left collects nothing more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from helpers.errors import InputError

ONLINE_SCORES = ("sum", "mean", "calibrated")
BLOCK_BYTES = 2**28  # logits held at once


class _Cache:
    """The tokens that one policy holds, for G groups of heads that choose alike; all groups hold equally many."""

    def __init__(self, n_groups: int, n_tokens: int, capacity: int) -> None:
        self.capacity = capacity
        self.held = np.zeros((n_groups, 0), dtype=np.int64)  # in order of position
        self.total, self.count, self.null = np.zeros((3, n_groups, n_tokens))
        self.evicted_at = np.full((n_groups, n_tokens), n_tokens, dtype=np.int64)

    def add(self, token: int) -> None:
        self.held = np.pad(self.held, ((0, 0), (0, 1)), constant_values=token)

    def observe(self, logits: npt.NDArray[np.float32]) -> None:
        """Softmax of one query's ``logits`` [G, heads, L] over what is held, added to the accumulators."""
        x = np.take_along_axis(logits, self.held[:, None], axis=-1).astype(np.float64)
        p = np.exp(x - x.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        for accumulator, added in (
            (self.total, p.sum(axis=1)), (self.count, 1.0), (self.null, logits.shape[1] / self.held.shape[-1])
        ):  # fmt: skip
            np.put_along_axis(
                accumulator, self.held, np.take_along_axis(accumulator, self.held, axis=-1) + added, axis=-1
            )

    def evict(self, step: int, score: str, n_sink: int, n_recent: int) -> None:
        """Let the lowest of the unprotected go until no more are held than allowed; the higher index among equals."""
        divisor = {"sum": np.ones_like(self.total), "mean": self.count, "calibrated": self.null}[score]
        groups = np.arange(len(self.held))
        while self.held.shape[-1] > self.capacity:
            # sinks never leave and recents have not yet: they are the first and the last of what is held
            unprotected = self.held[:, n_sink : self.held.shape[-1] - n_recent]
            value = np.take_along_axis(self.total, unprotected, -1) / np.take_along_axis(divisor, unprotected, -1)
            lowest = value.shape[-1] - 1 - np.argmin(value[:, ::-1], axis=-1)
            self.evicted_at[groups, unprotected[groups, lowest]] = step
            stay = np.ones(self.held.shape, dtype=bool)
            stay[groups, n_sink + lowest] = False
            self.held = self.held[stay].reshape(len(groups), -1)


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
    caches = [_Cache(n_groups, n_tokens, n_sink + n_recent + budget) for budget in budgets]
    first = 0
    if prompt_mass is not None:
        first = prompt_mass.shape[-1]
        mass = prompt_mass.double().cpu().numpy().reshape(n_groups, -1, first).sum(axis=1)
        null = n_heads // n_groups * np.cumsum(1 / np.arange(first, 0, -1.0))[::-1]
        for cache in caches:
            cache.held = np.tile(np.arange(first), (n_groups, 1))
            cache.total[:, :first], cache.null[:, :first] = mass, null
            cache.count[:, :first] = np.arange(first, 0, -1)
            cache.evict(first - 1, score, n_sink, n_recent)
    grouped_key = key.repeat_interleave(n_heads // len(key), dim=0).float()
    rows = max(1, BLOCK_BYTES // (4 * n_heads * n_tokens))
    for start in range(first, n_tokens, rows):
        end = min(start + rows, n_tokens)
        block = scale * query[:, start:end].float() @ grouped_key[:, :end].transpose(1, 2)
        logits = block.transpose(0, 1).reshape(end - start, n_groups, n_heads // n_groups, end).cpu().numpy()
        for step in range(start, end):
            for cache in caches:
                cache.add(step)
                cache.observe(logits[step - start])
                cache.evict(step, score, n_sink, n_recent)
    return np.stack([cache.evicted_at for cache in caches])
