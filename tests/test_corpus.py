"""What a model of this project reads, and what is kept from it."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from pathlib import Path

import pytest

from helpers.corpus import Document, documents
from helpers.inputs import read_text, read_texts


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return documents()


def test_documents_are_the_running_pythons_own(corpus: list[Document]) -> None:
    texts = {document.name: document.text for document in corpus}
    assert list(texts) == sorted(texts)
    assert len(texts) == len(corpus)
    import json.decoder

    assert texts["json.decoder"] == Path(json.decoder.__file__).read_text()
    assert texts["topic:with"] == pydoc_data.topics.topics["with"]
    assert not any(part in document.name.split(".") for document in corpus for part in ("test", "site-packages"))


def test_the_split_is_by_name_alone(corpus: list[Document]) -> None:
    """One in ten by the name's digest, so that every Python holds out the same names."""
    for document in corpus:
        first = int(hashlib.sha256(document.name.encode()).hexdigest()[:8], 16)
        assert document.held_out == (first % 10 == 0)
        assert Document(document.name, "another text").held_out == document.held_out
    assert 0.05 < sum(document.held_out for document in corpus) / len(corpus) < 0.15


def test_no_held_out_text_stands_in_the_training_text_under_another_name(corpus: list[Document]) -> None:
    training = {document.sha256 for document in corpus if not document.held_out}
    assert not [document.name for document in corpus if document.held_out and document.sha256 in training]


def test_the_builtin_text_is_held_out_topics_first_the_longest_first(corpus: list[Document]) -> None:
    by_text = {document.text: document for document in corpus}
    found = [by_text[text] for _, text in read_texts("builtin")]
    assert found[0].text == read_text("builtin")[1]
    assert len(found[0].text) > 20_000
    assert all(document.held_out for document in found)
    assert len(found) == sum(document.held_out for document in corpus)
    topics = [document.name.startswith("topic:") for document in found]
    assert topics == sorted(topics, reverse=True)
    for kind in (True, False):
        lengths = [len(document.text) for document, topic in zip(found, topics, strict=True) if topic == kind]
        assert lengths == sorted(lengths, reverse=True)
    assert read_texts("builtin", at_most=2) == read_texts("builtin")[:2]
