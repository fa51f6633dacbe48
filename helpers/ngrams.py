"""Language models that only count: what a trained one must beat on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """How often n-grams stand in a text. N-grams are numbered as digits to the base of the vocabulary, in order."""

    keys: Ids
    counts: Ids

    @classmethod
    def of(cls, keys: Ids) -> Counts:
        return cls(*np.unique(keys, return_counts=True))

    def __getitem__(self, keys: Ids) -> Ids:
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


class TrigramModel:
    """Unigram and interpolated trigram model of one text, smoothed after Witten and Bell (1991).

    p(w | h) = (c(h w) + t(h) · p(w | h')) ÷ (c(h) + t(h)): c counts in the training text, t(h) is the number of
    different tokens after h, and h' is h without its first token. The unigram model adds one to every count.
    """

    def __init__(self, stream: Ids, vocab_size: int) -> None:
        stream = np.asarray(stream, dtype=np.int64)
        self.size = vocab_size
        self.unigrams = np.bincount(stream, minlength=vocab_size)
        bigrams = stream[:-1] * vocab_size + stream[1:]
        trigrams = bigrams[:-1] * vocab_size + stream[2:]
        self.ngrams = {2: Counts.of(bigrams), 3: Counts.of(trigrams)}
        self.contexts = {2: Counts.of(stream[:-1]), 3: Counts.of(bigrams[:-1])}
        self.followers = {n: Counts.of(ngrams.keys // vocab_size) for n, ngrams in self.ngrams.items()}

    def unigram(self, ids: Ids) -> Probabilities:
        """Probabilities of ``ids`` by themselves, the shape of ``ids``."""
        probability: Probabilities = (self.unigrams[ids] + 1) / (self.unigrams.sum() + self.size)
        return probability

    def trigram(self, ids: Ids) -> Probabilities:
        """Probabilities [..., L - 2] of the third and later tokens of ``ids`` [..., L], each after the two before."""
        ids = np.asarray(ids, dtype=np.int64)
        target, before = ids[..., 2:], ids[..., 1:-1]
        two_before = ids[..., :-2] * self.size + before
        probability = self.unigram(target)
        for n, context in ((2, before), (3, two_before)):
            followers = self.followers[n][context]
            seen = self.contexts[n][context] + followers
            counted = self.ngrams[n][context * self.size + target] + followers * probability
            probability = np.where(seen > 0, counted / np.maximum(seen, 1), probability)
        return probability
