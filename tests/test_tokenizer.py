"""Tokenizers: Kimi's splits are the published ones, every byte comes back, and no text is taken for a special token."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from helpers.errors import InputError
from helpers.tokenizer import (
    SHORT,
    TIKTOKEN_MODEL,
    TOKENIZER_JSON,
    Tokenizer,
    Tokens,
    first_tokens,
    has_tokenizer,
    load_tokenizer,
)

BYTES = [bytes([i]) for i in range(256)]
# moonshotai/Kimi-K2-Instruct, tokenization_kimi.py, as one expression
PUBLISHED_PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def write_tiktoken(folder: Path, tokens: Iterable[bytes]) -> Path:
    """One base64 token and its rank a line, as Kimi publishes it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
    (folder / TIKTOKEN_MODEL).write_bytes(b"".join(lines))
    return folder


def kimi(folder: Path, *further: str) -> Tokenizer:
    """A tokenizer of all 256 bytes and some whole pieces: a piece in the vocabulary is always one token."""
    pieces = [text.encode() for text in further]
    # a piece is only reached by merges of two, so its beginnings are tokens too
    beginnings = [piece[:end] for piece in pieces for end in range(2, len(piece))]
    return load_tokenizer(write_tiktoken(folder, dict.fromkeys([*BYTES, *beginnings, *pieces])))


# tiktoken.model


def test_kimi_splits_text_as_the_published_pattern_does(tmp_path: Path) -> None:
    """All texts of up to four of these characters; every such text is one token unless the pattern splits it."""
    alphabet = ["a", "S", "é", "中", "1", " ", "'", "s", "\n", "!"]
    texts = ["".join(letters) for n in (1, 2, 3, 4) for letters in itertools.product(alphabet, repeat=n)]
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, dict.fromkeys([*BYTES, *(text.encode() for text in texts)])))
    published = regex.compile(PUBLISHED_PATTERN, regex.V1)
    assert len(published.findall("a中")) == 2
    for text in texts:
        assert tokenizer.encode(text).texts == published.findall(text), repr(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("가나中", ["가나", "中"]),
        ("1234567", ["123", "456", "7"]),
        ("x2026", ["x", "202", "6"]),
        ("don't stop", ["don't", " stop"]),
        ("DON'T", ["DON'T"]),
        ("they'll we've I'd", ["they'll", " we've", " I'd"]),
        ("rock'n'roll", ["rock", "'n", "'roll"]),
        ("camelCase", ["camel", "Case"]),
        ("HTTPServer", ["HTTPServer"]),
        ("a  b", ["a", " ", " b"]),
        ("a\n\n  b", ["a", "\n\n", " ", " b"]),
        ("if(x):\n", ["if", "(x", "):\n"]),
    ],
)
def test_pieces_that_kimi_keeps_together_and_apart(tmp_path: Path, text: str, pieces: list[str]) -> None:
    """Han runs apart from letters, digits by three, contractions with their word."""
    joined = [text[start:end] for start in range(len(text)) for end in range(start + 1, len(text) + 1)]
    assert kimi(tmp_path, *joined).encode(text).texts == pieces


@pytest.fixture(scope="module")
def small_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    merges = [b"th", b"the", b" the", "é".encode(), "中".encode()[:2], "中".encode(), b"  ", b"00"]
    return write_tiktoken(tmp_path_factory.mktemp("kimi"), [*BYTES, *merges])


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("the é中0 \n", max_size=60))
def test_every_byte_of_a_text_comes_back_from_its_ids(small_kimi: Path, text: str) -> None:
    lines = (small_kimi / TIKTOKEN_MODEL).read_text().splitlines()
    token_of = {int(rank): base64.b64decode(token) for token, rank in (line.split() for line in lines)}
    tokens = load_tokenizer(small_kimi).encode(text)
    assert b"".join(token_of[i] for i in tokens.ids) == text.encode()
    assert len(tokens.texts) == len(tokens.ids)
    for i, shown in zip(tokens.ids, tokens.texts, strict=True):
        if token_of[i].isascii():
            assert shown == token_of[i].decode()


def test_merges_are_applied_by_rank(small_kimi: Path) -> None:
    assert load_tokenizer(small_kimi).encode("the the0000").texts == ["the", " the", "00", "0", "0"]


def test_bytes_that_are_no_text_on_their_own_are_shown_as_bytes(small_kimi: Path) -> None:
    tokens = load_tokenizer(small_kimi).encode("é中ü😀")
    assert tokens.texts == ["é", "中", "\\xc3", "\\xbc", "\\xf0", "\\x9f", "\\x98", "\\x80"]


@pytest.mark.parametrize("special", ["<|im_end|>", "[BOS]", "<|tool_calls_section_begin|>"])
def test_names_of_kimis_special_tokens_in_a_text_are_plain_text(small_kimi: Path, special: str) -> None:
    """Text that someone wrote must not end a turn."""
    tokens = load_tokenizer(small_kimi).encode(f"a{special}b")
    assert max(tokens.ids) < 256 + 8
    assert "".join(tokens.texts) == f"a{special}b"
    assert special not in tokens.texts


def test_a_long_run_of_spaces_is_encoded(small_kimi: Path) -> None:
    """The split pattern's look-ahead recurses; Kimi's own code cuts such runs before it splits."""
    text = " " * 1_000_000
    assert "".join(load_tokenizer(small_kimi).encode(text).texts) == text


ONE_A_LINE = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(BYTES))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 2795286\n",
        ONE_A_LINE + b"aGk=\n",
        ONE_A_LINE + b"aGk= many\n",
        ONE_A_LINE + b"aGk= 256 1\n",
        ONE_A_LINE + b"not*base64 256\n",
        ONE_A_LINE + b"aGk= 25\n",
        ONE_A_LINE + b"aGk= -1\n",
        ONE_A_LINE[2000:],
    ],
    ids=[
        "empty", "binary", "lfs-pointer", "rank-missing", "rank-no-number", "third-word", "no-base64", "rank-cut-short",
        "negative-rank", "beginning-missing",
    ],
)  # fmt: skip
def test_a_bad_tiktoken_model_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / TIKTOKEN_MODEL).write_bytes(content)
    with pytest.raises(InputError, match=rf"{TIKTOKEN_MODEL} of small .*(fetch it again|`git lfs pull`)"):
        load_tokenizer(tmp_path / "small").encode("hi there")


# tokenizer.json


def gpt2_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where it is printable, else the next character from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level(template: bool = False) -> HuggingFaceTokenizer:
    """A byte-level BPE as Llama 3 and SmolLM2 have, with a few merges and special tokens."""
    vocabulary = {character: byte for byte, character in gpt2_alphabet().items()}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    for a, b in merges:
        vocabulary[a + b] = len(vocabulary)
    tokenizer = HuggingFaceTokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|begin|>", "<|im_end|>")])
    if template:
        tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    return tokenizer


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    byte_level().save(str(folder / TOKENIZER_JSON))
    return folder


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text("the é中<|im_end|>", max_size=60))
def test_every_byte_comes_back_from_the_ids_of_a_tokenizer_json(small_llama: Path, text: str) -> None:
    tokens = load_tokenizer(small_llama).encode(text)
    vocabulary = {i: token for token, i in byte_level().get_vocab(with_added_tokens=False).items()}
    byte_of = {character: byte for byte, character in gpt2_alphabet().items()}
    assert bytes(byte_of[character] for i in tokens.ids for character in vocabulary[i]) == text.encode()
    assert len(tokens.texts) == len(tokens.ids)
    if text.isascii():
        assert "".join(tokens.texts) == text


def test_names_of_special_tokens_in_a_text_are_plain_text(small_llama: Path) -> None:
    """The library's default turns them into the special token."""
    special = byte_level().token_to_id("<|im_end|>")
    assert byte_level().encode("a<|im_end|>b").ids.count(special) == 1
    tokens = load_tokenizer(small_llama).encode("a<|im_end|>b")
    assert special not in tokens.ids
    assert tokens.texts == list("a<|im_end|>b")


def test_the_token_that_begins_a_text_is_kept(tmp_path: Path) -> None:
    """Where a tokenizer puts one in front, the model was trained on it, and it is the attention sink."""
    byte_level(template=True).save(str(tmp_path / TOKENIZER_JSON))
    tokens = load_tokenizer(tmp_path).encode("a the")
    assert tokens.ids[0] == byte_level().token_to_id("<|begin|>")
    assert tokens.texts == ["<|begin|>", "a", " the"]


def test_parts_of_a_character_are_shown_as_bytes_by_tokenizer_json_too(small_llama: Path) -> None:
    r"""As :class:`Tokens` promises; U+FFFD for each would make different tokens look the same."""
    assert load_tokenizer(small_llama).encode("é b").texts == ["\\xc3", "\\xa9", " ", "b"]


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    """Settings that someone saved for training would cut the text or fill it up."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / TOKENIZER_JSON))
    assert len(HuggingFaceTokenizer.from_file(str(tmp_path / TOKENIZER_JSON)).encode("abcdef").ids) == 50
    assert load_tokenizer(tmp_path).encode("abcdef").texts == list("abcdef")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\noid sha"])
def test_a_bad_tokenizer_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / TOKENIZER_JSON).write_bytes(content)
    with pytest.raises(InputError, match=rf"{re.escape(TOKENIZER_JSON)} of small .*(fetch it again|`git lfs pull`)"):
        load_tokenizer(tmp_path / "small")


# Which one


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    assert not has_tokenizer(tmp_path / "small")
    with pytest.raises(InputError, match=rf"small has no tokenizer \({TOKENIZER_JSON} or .*\).*use input=random"):
        load_tokenizer(tmp_path / "small")


def test_either_file_is_a_tokenizer(small_kimi: Path, small_llama: Path) -> None:
    assert has_tokenizer(small_kimi)
    assert has_tokenizer(small_llama)
    assert load_tokenizer(small_kimi).encode("é").ids != load_tokenizer(small_llama).encode("é").ids


# -- the beginning of a long text


WORDS = ["word", " ", "\n\n", "    ", "é", "𝒳", "中文", "don't", "1234", "!!!", "a" * 40, " " * 60, "\r\n", "ab" * 30]


@pytest.fixture(scope="module")
def long_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return kimi(tmp_path_factory.mktemp("long"), *WORDS, " word", "abab")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS) | st.text(max_size=6), min_size=1, max_size=60),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_the_first_tokens_of_a_text_are_those_of_the_whole_text(
    long_tokens: Tokenizer, small_llama: Path, parts: list[str], n: int, a_token: int
) -> None:
    """Beginnings that are far too short make the cut fall into words, runs and characters."""
    text = "".join(parts)
    for tokenizer in (long_tokens, load_tokenizer(small_llama)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("helpers.tokenizer.CHARACTERS_A_TOKEN", a_token)
            patch.setattr("helpers.tokenizer.SHORT", 4)
            found = first_tokens(tokenizer, text, n)
        whole = tokenizer.encode(text)
        assert found == Tokens(whole.ids[:n], whole.texts[:n])


def test_a_long_text_is_not_read_to_its_end(small_kimi: Path) -> None:
    lengths = []

    class Noting:
        def encode(self, text: str) -> Tokens:
            lengths.append(len(text))
            return load_tokenizer(small_kimi).encode(text)

    assert len(first_tokens(Noting(), "some words " * 10**6, 100).ids) == 100
    assert max(lengths) <= 4 * SHORT
