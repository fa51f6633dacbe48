"""How good a small language model is, measured from its stored files on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch.nn import functional
from tqdm import tqdm

from helpers.capture import record_attention
from helpers.miniature import N_RANKS, N_SPECIAL
from helpers.ngrams import Ids, TrigramModel
from helpers.parameters import Parameters
from helpers.policies import evict
from helpers.scores import attention_mass, chance_overlap, heavy_tail
from helpers.training import TokenizedCorpus

LENGTH = 1024  # tokens that are predicted of each document that has them
FAR, NEAR = range(700, 1000, 4), 32  # where context is measured, and how many tokens the short one has
PASSAGE, AGAIN = slice(128, 192), 320  # a passage that stands twice: where it is, and where it comes again
BATCH_TOKENS = 8192


def held_out_windows(corpus: TokenizedCorpus) -> torch.Tensor:
    """The first 1,025 tokens [documents, 1025] of each held-out document that has so many."""
    return torch.stack([ids[: LENGTH + 1] for ids in corpus.held_out if len(ids) > LENGTH])


def seen_before(corpus: TokenizedCorpus, length: int = 32) -> float:
    """Share of the held-out text's windows of ``length`` tokens that stand somewhere in the training text, too."""
    training = _fingerprints(corpus.stream.numpy(), length)
    held_out = np.concatenate([_fingerprints(ids.numpy(), length) for ids in corpus.held_out if len(ids) >= length])
    return float(np.isin(held_out, training).mean())


def _fingerprints(ids: Ids, length: int) -> npt.NDArray[np.uint64]:
    """64-bit numbers of all windows [n - length + 1], equal where the windows are: polynomials modulo 2**64."""
    numbers = np.zeros(len(ids) - length + 1, dtype=np.uint64)
    for i in range(length):
        numbers = numbers * np.uint64(6364136223846793005) + ids[i : i + len(numbers)].astype(np.uint64) + np.uint64(1)
    return numbers


@torch.no_grad()
def token_losses(model: Any, tokens: torch.Tensor, last: int | None = None) -> torch.Tensor:
    """Cross-entropy in nats, float32, of each token of ``tokens`` [n, L] after those before it: [n, L - 1].

    With ``last``, only the ``last`` tokens are predicted: [n, last].
    """
    keep = tokens.shape[1] - 1 if last is None else last
    losses = []
    for part in _batches(tokens):
        part = part.to(model.device)
        logits = model(input_ids=part[:, :-1], use_cache=False, logits_to_keep=keep).logits.float()
        losses.append(functional.cross_entropy(logits.transpose(1, 2), part[:, -keep:], reduction="none").cpu())
    return torch.cat(losses)


def held_out_losses(model: Any, corpus: TokenizedCorpus) -> dict[str, float]:
    """Mean loss in nats a token on the held-out text: the model's, and those of models that count, on the same tokens.

    The third and later tokens of each window are predicted, so that a trigram has its context.
    """
    windows = held_out_windows(corpus)
    counted = TrigramModel(corpus.stream.numpy(), N_RANKS + N_SPECIAL)
    return {
        "model": float(token_losses(model, windows)[:, 1:].mean()),
        "trigram": float(-np.log(counted.trigram(windows.numpy())).mean()),
        "unigram": float(-np.log(counted.unigram(windows.numpy()[:, 2:])).mean()),
    }


def context_losses(model: Any, corpus: TokenizedCorpus) -> dict[str, float]:
    """Mean loss on every fourth token from 700 to 999, with everything before them and with the last 32 alone."""
    windows = held_out_windows(corpus)
    everything = token_losses(model, windows)[:, [i - 1 for i in FAR]]
    near = torch.cat([windows[:, i - NEAR : i + 1] for i in FAR])
    return {"everything": float(everything.mean()), "last_32": float(token_losses(model, near, last=1).mean())}


def copying_losses(model: Any, corpus: TokenizedCorpus) -> dict[str, float]:
    """Mean loss on 64 tokens of each window where they stand, and where they stand again behind other text."""
    windows = held_out_windows(corpus)
    twice = torch.cat([windows[:, :AGAIN], windows[:, PASSAGE]], dim=1)
    losses = token_losses(model, twice)
    return {
        "first": float(losses[:, PASSAGE.start - 1 : PASSAGE.stop - 1].mean()),
        "second": float(losses[:, AGAIN - 1 :].mean()),
    }


@torch.no_grad()
def heavy_sets(model: Any, corpus: TokenizedCorpus, parameters: Parameters | None = None) -> pd.DataFrame:
    """Heavy sets of every layer on the held-out windows' prompts, beside the null's: one row a layer.

    Means over documents of ``overlap_with_null`` (the share of the heavy set that the null would keep) and of the
    figures of :func:`~helpers.scores.heavy_tail`, with ``chance``, the overlap of a set drawn at random.
    """
    parameters = parameters or Parameters()
    rows = []
    for window in held_out_windows(corpus)[:, : parameters.seq_len]:
        with record_attention(model) as layers:
            model(input_ids=window[None].to(model.device), use_cache=False)
        for i, sums in layers.items():
            score = attention_mass(sums.first_sample())
            categories = evict(score, parameters.n_sink, parameters.n_recent, parameters.budget)
            rows.append({"layer": i, **heavy_tail(score, categories), "chance": chance_overlap(categories)})
    return pd.DataFrame(rows).groupby("layer").mean()


def _batches(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    parts = tokens.split(max(1, BATCH_TOKENS // tokens.shape[1]))
    return iter(tqdm(parts, desc="Measuring", unit="batch", leave=False, delay=2))
