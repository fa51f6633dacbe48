"""Online eviction, as H2O's paper has it: one token leaves at each step, and what left collects nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from helpers.errors import InputError
from helpers.products import ONE_AT_A_TIME, exact_products_of
from helpers.scores import uniform_causal_null

ONLINE_SCORES = ("sum", "mean", "calibrated")
BLOCK_BYTES = 2**28  # logits held at once
LITTLE_WORK = 2**20  # elements: about a millisecond of one thread
SMALLEST = 1e-200  # of a cache's share of all exponentials


class _Caches:
    """The tokens that K caches hold, for G groups of heads that choose alike, and what these have collected.

    A cache is one score at one capacity; they lie in order of capacity, so that the full ones come first. All arrays
    are [G, K, L] with the last token first, for argmin takes the first of equals. The groups of a cache hold equally
    many tokens. The total of a token that left is infinite.
    """

    def __init__(self, scores: Sequence[str], capacities: Sequence[int], n_groups: int, n_tokens: int) -> None:
        self.scores, self.n_tokens = scores, n_tokens
        self.capacity = torch.tensor(sorted(capacities)).repeat_interleave(len(scores))
        self.n_held = torch.zeros_like(self.capacity)
        shape = (n_groups, len(self.capacity), n_tokens)
        self.held, self.total = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.evicted_at = torch.full(shape, n_tokens)
        self.divisor = {
            name: torch.zeros(n_groups, len(capacities), n_tokens, dtype=torch.float64)
            for name in scores
            if name != "sum"
        }

    def start_with(self, mass: torch.Tensor, heads: int) -> None:
        """Hold a whole prompt, whose tokens have collected ``mass`` [G, P] from so many heads a group."""
        n_tokens = mass.shape[-1]
        prompt = slice(self.n_tokens - n_tokens, None)
        self.n_held[:] = n_tokens
        self.held[..., prompt] = 1
        self.total[..., prompt] = mass.flip(-1)[:, None]
        counts = {"mean": np.arange(n_tokens, 0, -1), "calibrated": uniform_causal_null(n_tokens, heads)}
        for name, divisor in self.divisor.items():
            divisor[..., prompt] = torch.from_numpy(counts[name][::-1].copy())

    def of(self, score: str) -> npt.NDArray[np.int64]:
        """``evicted_at`` of the caches that use ``score``, the first token first and the smallest cache first."""
        caches = slice(self.scores.index(score), None, len(self.scores))
        return self.evicted_at[:, caches].flip(-1).transpose(0, 1).numpy()

    def observe(self, step: int, logits: torch.Tensor) -> None:
        """Take up token ``step``, and add its query's softmax over what is held; ``logits`` [G, heads, step + 1]."""
        seen = slice(self.n_tokens - 1 - step, None)
        held, heads = self.held[..., seen], logits.shape[1]
        held[..., 0] = 1
        self.n_held += 1
        # one exponential serves all caches: each divides by the sum over its own tokens
        e = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        sums = e @ held.transpose(1, 2)  # [G, heads, K]
        if sums.min() > SMALLEST:
            self.total[..., seen].addcmul_((1 / sums).transpose(1, 2) @ e, held)
        else:  # what a cache holds has nearly nothing of all: its own maximum has to be taken out
            x = logits[:, :, None].masked_fill(held[:, None] == 0, float("-inf"))  # [G, heads, K, step + 1]
            self.total[..., seen] += torch.softmax(x, dim=-1).sum(dim=1)
        for name, divisor in self.divisor.items():
            caches = slice(self.scores.index(name), None, len(self.scores))
            each = 1 if name == "mean" else heads / self.n_held[caches, None]
            divisor[..., seen] += held[:, caches] * each

    def evict(self, step: int, n_sink: int, n_recent: int) -> None:
        """Let the lowest of the unprotected go until no more are held than allowed; the latest token among equals."""
        first, last = self.n_tokens - max(n_sink, step + 1 - n_recent), self.n_tokens - n_sink
        while n_full := int((self.n_held > self.capacity).sum()):
            for i, name in enumerate(self.scores):
                full = slice(i, n_full, len(self.scores))
                value = self.total[:, full, first:last]
                if name in self.divisor:
                    value = value / self.divisor[name][:, : value.shape[1], first:last]
                lowest = first + value.argmin(dim=-1, keepdim=True)  # [G, full, 1]
                for array, gone in ((self.held, 0.0), (self.total, torch.inf), (self.evicted_at, step)):
                    array[:, full].scatter_(-1, lowest, gone)
            self.n_held[:n_full] -= 1


def online_eviction(
    query: torch.Tensor, key: torch.Tensor, scale: float, n_sink: int, n_recent: int, budgets: Sequence[int],
    *, choices: Sequence[tuple[str, int]] = (("sum", 1),), prompt_mass: torch.Tensor | None = None,
) -> dict[tuple[str, int], npt.NDArray[np.int64]]:  # fmt: skip
    """Evict step by step while L tokens are read; return for each choice the step after which each token was gone.

    Each result is [budgets, G, L], and a token that stays has L. At step t, each head's softmax runs over the surviving
    keys and the new one; ``total_j += p``, ``count_j += 1``, ``null_j += heads ÷ keys held`` for these, never rescaled.
    Then, while more than ``n_sink + n_recent + budget`` keys are held, the unprotected one of the lowest score goes:
    ``sum`` is the total (H2O's Algorithm 1, arXiv:2306.14048), ``mean`` total ÷ count, ``calibrated`` total ÷ null.

    Args:
        query: [H, L, width].
        key: [KV, L, width]; neighbouring query heads share a key head.
        scale: what logits are multiplied with.
        n_sink: first tokens that never leave.
        n_recent: last tokens that can't leave yet.
        budgets: further tokens that can be held.
        choices: pairs of a score, one of ``ONLINE_SCORES``, and G, the groups of neighbouring heads that choose for
            themselves; 1 is head-shared. Every choice and budget is a cache of its own; all read the same logits.
        prompt_mass: [H, P], the full cache's mass: the first P tokens were read without eviction
            (``start="after-prompt"``). None: ``start="first-token"``, as in the paper.

    Raises:
        InputError: another score, a negative count, or groups that don't divide the heads.
    """
    n_heads, n_tokens, _ = query.shape
    if min(n_sink, n_recent, *budgets) < 0:
        raise InputError("n_sink, n_recent and budgets must be at least 0.")
    by_groups: dict[int, list[str]] = {}
    for score, n_groups in dict.fromkeys(choices):
        if score not in ONLINE_SCORES:
            raise InputError(f"Online eviction has the scores {', '.join(ONLINE_SCORES)}, not '{score}'.")
        if n_groups < 1 or n_heads % n_groups:
            raise InputError(f"{n_heads} heads don't make {n_groups} equal groups.")
        by_groups.setdefault(n_groups, []).append(score)
    capacities = [n_sink + n_recent + budget for budget in budgets]
    caches = {n: _Caches(scores, capacities, n, n_tokens) for n, scores in by_groups.items()}
    first = 0
    if prompt_mass is not None:
        first = prompt_mass.shape[-1]
        for n_groups, held in caches.items():
            mass = prompt_mass.double().cpu().reshape(n_groups, -1, first).sum(dim=1)
            held.start_with(mass, n_heads // n_groups)
            held.evict(first - 1, n_sink, n_recent)
    last_first = key.float().flip(1).repeat_interleave(n_heads // len(key), dim=0)
    rows = max(1, BLOCK_BYTES // (4 * n_heads * n_tokens))
    for start in range(first, n_tokens, rows):
        end = min(start + rows, n_tokens)
        keys = last_first[:, n_tokens - end :].transpose(1, 2)
        with exact_products_of(query.dtype):
            block = (query[:, start:end].float() @ keys).mul_(scale).cpu()
        with _one_thread_for(len(budgets) * n_tokens * sum(n * len(held.scores) for n, held in caches.items())):
            for step in range(start, end):
                logits = block[:, step - start, end - 1 - step :].double()
                for n_groups, held in caches.items():
                    held.observe(step, logits.view(n_groups, -1, step + 1))
                    held.evict(step, n_sink, n_recent)
    rank = np.argsort(np.argsort(budgets, kind="stable"))
    return {(score, n): caches[n].of(score)[rank] for score, n in choices}


@contextmanager
def _one_thread_for(elements: int) -> Iterator[None]:
    """Let a loop of steps over so many elements each run in one thread, where that is little work.

    A short step ends sooner than its threads have met, and on a busy machine each meeting waits for the scheduler.
    """
    with ONE_AT_A_TIME:
        before = torch.get_num_threads()
        if elements < LITTLE_WORK:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
