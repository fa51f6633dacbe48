"""Which tokens stay when a cache must shrink: protected sinks and recents, and the best of the middle by a score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from helpers.errors import InputError

CATEGORIES = ("sink", "recent", "heavy", "evicted")
# What a score must beat, and what none can: see :func:`control_score` and ``mass_continuation``.
CONTROLS = ("recency", "random", "earliest", "oracle")

Kept = npt.NDArray[np.bool_]


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
    kept = kept_tokens(values, n_sink, n_recent, budget)
    middle = middle_tokens(len(values), n_sink, n_recent)
    categories = np.where(kept, "heavy", "evicted").astype(object)
    categories[: middle.start] = "sink"
    categories[middle.stop :] = "recent"
    return list(categories)


def kept_tokens(score: npt.NDArray[np.floating], n_sink: int, n_recent: int, budget: int) -> Kept:
    """Return True for each token that :func:`evict` keeps, for scores [..., P]: one set, or one a group of heads.

    Of one score, the kept set of a smaller budget lies within that of a larger one.

    Raises:
        InputError: as :func:`evict`.
    """
    for name, count in (("n_sink", n_sink), ("n_recent", n_recent), ("budget", budget)):
        if count < 0:
            raise InputError(f"{name} must be at least 0, not {count}.")
    if not np.isfinite(score).all():
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(score))[0])
        raise InputError(f"The score of token {first[-1]} is {score[first]}: only finite scores can be ranked.")
    middle = middle_tokens(score.shape[-1], n_sink, n_recent)
    kept = np.ones(score.shape, dtype=bool)
    evicted = np.argsort(-score[..., middle], axis=-1, kind="stable")[..., budget:]
    np.put_along_axis(kept[..., middle], evicted, False, axis=-1)
    return kept


def middle_tokens(n_tokens: int, n_sink: int, n_recent: int) -> slice:
    """The tokens that are neither sinks nor recents."""
    start = min(n_sink, n_tokens)
    return slice(start, max(start, n_tokens - n_recent))  # not up to -n_recent, which is nothing for 0


def control_score(name: str, n_tokens: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """The score [P] of a control that reads no weight: ``recency``, ``earliest`` (the null's choice) or ``random``.

    Positions stay the original ones, so ``recency`` isn't StreamingLLM's renumbering inside the cache. The fourth
    control, the mass ``oracle``, ranks by the mass that the continuation's queries give, which no policy can know.
    """
    if name == "random":
        return np.random.default_rng(seed).random(n_tokens)
    position = np.arange(n_tokens, dtype=np.float64)
    return position if name == "recency" else -position
