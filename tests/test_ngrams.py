"""The models that count, beside plain loops and the laws of probability."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ngrams import TrigramModel

VOCABULARY = 5
streams = st.lists(st.integers(0, VOCABULARY - 1), min_size=3, max_size=60)


def witten_bell(stream: list[int], history: tuple[int, ...], word: int) -> float:
    """The formula, in plain loops over the text."""
    if not history:
        return (stream.count(word) + 1) / (len(stream) + VOCABULARY)
    n = len(history)
    after = Counter(stream[i + n] for i in range(len(stream) - n) if tuple(stream[i : i + n]) == history)
    lower = witten_bell(stream, history[1:], word)
    seen, kinds = sum(after.values()), len(after)
    return (after[word] + kinds * lower) / (seen + kinds) if seen else lower


@given(streams, streams)
def test_probabilities_are_those_of_the_formula(stream: list[int], text: list[int]) -> None:
    model = TrigramModel(np.array(stream), VOCABULARY)
    expected = [witten_bell(stream, tuple(text[i - 2 : i]), text[i]) for i in range(2, len(text))]
    np.testing.assert_allclose(model.trigram(np.array(text)), expected, rtol=1e-12)
    singles = [witten_bell(stream, (), word) for word in text]
    np.testing.assert_allclose(model.unigram(np.array(text)), singles, rtol=1e-12)


@given(streams)
def test_probabilities_of_all_words_add_up_to_one_after_any_history(stream: list[int]) -> None:
    model = TrigramModel(np.array(stream), VOCABULARY)
    words = range(VOCABULARY)
    assert model.unigram(np.arange(VOCABULARY)).sum() == pytest.approx(1)
    for first, second in product(words, words):
        ids = np.array([[first, second, word] for word in words])
        assert model.trigram(ids).sum() == pytest.approx(1)


def test_a_text_that_repeats_is_foreseen() -> None:
    stream = np.array([0, 1, 2, 3] * 50)
    loss = -np.log(TrigramModel(stream, 4).trigram(np.array([0, 1, 2, 3, 0, 1]))).mean()
    assert loss < 0.1 < -np.log(TrigramModel(stream, 4).unigram(stream)).mean()
