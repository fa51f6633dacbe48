"""Which tokens stay when a cache must shrink: protected sinks and recents, and the best of the middle by a score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from helpers.errors import InputError

CATEGORIES = ("sink", "recent", "heavy", "evicted")


def evict(
    score: Sequence[float] | npt.NDArray[np.floating] | torch.Tensor, n_sink: int, n_recent: int, budget: int
) -> list[str]:
    """Return one category a token, in order: ``sink``, ``recent``, ``heavy`` or ``evicted``; the first three are kept.

    The first ``n_sink`` and the last ``n_recent`` tokens are protected (StreamingLLM, arXiv:2309.17453); of the middle,
    the ``budget`` tokens of the highest score stay (H2O, arXiv:2306.14048), the lower index first among equals. Where
    the protected tokens are more than there are, sinks come first. A middle of no more than ``budget`` loses nothing.

    Raises:
        InputError: a negative count, or a score that is NaN or infinite.
    """
    values = (
        score.detach().double().cpu().numpy() if isinstance(score, torch.Tensor) else np.asarray(score, dtype=float)
    )
    if values.ndim != 1:
        raise InputError(
            f"evict takes one score a token, not an array of shape {list(values.shape)}: sum over heads first."
        )
    for name, count in (("n_sink", n_sink), ("n_recent", n_recent), ("budget", budget)):
        if count < 0:
            raise InputError(f"{name} must be at least 0, not {count}.")
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(f"The score of token {first} is {values[first]}: only finite scores can be ranked.")
    n_tokens = len(values)
    middle_start = min(n_sink, n_tokens)
    middle_end = max(middle_start, n_tokens - n_recent)  # not a slice from -n_recent, which is everything for 0
    categories = np.full(n_tokens, "evicted", dtype=object)
    categories[:middle_start] = "sink"
    categories[middle_end:] = "recent"
    best = np.argsort(-values[middle_start:middle_end], kind="stable")[:budget]
    categories[middle_start + best] = "heavy"
    return list(categories)
