"""Text to token ids, with the checkpoint's own tokenizer and none of its code."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import tiktoken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from helpers.errors import InputError
from helpers.files import refuse_lfs_pointer

TOKENIZER_JSON = "tokenizer.json"
TIKTOKEN_MODEL = "tiktoken.model"

# Kimi's split pattern (moonshotai/Kimi-K2-Instruct, tokenization_kimi.py). transformers' AutoTokenizer takes the same
# folder with another pattern and without a warning.
_HAN = r"[\p{Han}]+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        _HAN,
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


# Kimi's own tokenizer cuts runs of space, or of anything else, at this length: the pattern's engine overflows on them.
LONGEST_RUN = 25_000
CHARACTERS_A_TOKEN = 16  # more than nearly all tokens have
SHORT = 2**16  # characters that are encoded at once without a thought
# how byte-level tokenizers write each byte as a printable character (GPT-2's alphabet)
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass(frozen=True)
class Tokens:
    r"""Token ids and the text each stands for; bytes that are no text on their own are shown as ``\xNN``."""

    ids: list[int]
    texts: list[str]


class Tokenizer(Protocol):
    """What a run needs of a tokenizer. Names of special tokens inside the text are plain text."""

    def encode(self, text: str) -> Tokens: ...


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_JSON).exists() or (folder / TIKTOKEN_MODEL).exists()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint folder.

    Raises:
        InputError: the folder has no ``tokenizer.json`` or ``tiktoken.model``, or an unreadable one.
    """
    if (folder / TOKENIZER_JSON).exists():
        return _JsonTokenizer(folder / TOKENIZER_JSON)
    if (folder / TIKTOKEN_MODEL).exists():
        return _KimiTokenizer(folder / TIKTOKEN_MODEL)
    raise InputError(
        f"{folder.name} has no tokenizer ({TOKENIZER_JSON} or {TIKTOKEN_MODEL}) and can't read text: use input=random."
    )


def first_tokens(tokenizer: Tokenizer, text: str, n: int) -> Tokens:
    """Return the first ``n`` tokens of ``text``, fewer if it has no more, without reading all of a long text.

    Tokens depend on what follows them only as far as a word reaches, so a beginning of the text is read that is doubled
    until the one before gave the same tokens.
    """
    tokens, length = Tokens([], []), max(n * CHARACTERS_A_TOKEN, SHORT)
    while True:
        shorter, tokens = tokens, tokenizer.encode(text[:length])
        settled = len(shorter.ids) > n and shorter.ids[:n] == tokens.ids[:n]
        if settled or length >= len(text):
            return Tokens(tokens.ids[:n], tokens.texts[:n])
        length *= 2


class _JsonTokenizer:
    """``tokenizer.json``, read by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        refuse_lfs_pointer(path, content)
        try:
            self.tokenizer = HuggingFaceTokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path.name} of {path.parent.name} can't be read ({error}): fetch it again.") from error
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, text: str) -> Tokens:
        ids = self.tokenizer.encode(text).ids
        return Tokens(ids, [self._text(i) for i in ids])

    def _text(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        piece = self.tokenizer.id_to_token(token_id) or ""
        if "\ufffd" in text and piece and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece).decode("utf-8", errors="backslashreplace")
        return text


class _KimiTokenizer:
    """``tiktoken.model``: a base64 token and its rank a line."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        refuse_lfs_pointer(path, content)
        try:
            pairs = (line.split() for line in content.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
            if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
                raise ValueError(f"{len(ranks)} tokens don't have the ranks 0 to {len(ranks) - 1}")
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{path.name} of {path.parent.name} can't be read ({error}): fetch it again.") from error
        self.encoding = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> Tokens:
        ids = [i for part in _cut_long_runs(text) for i in self.encoding.encode_ordinary(part)]
        pieces = self.encoding.decode_tokens_bytes(ids)
        return Tokens(ids, [piece.decode("utf-8", errors="backslashreplace") for piece in pieces])


def _cut_long_runs(text: str) -> list[str]:
    longer = re.finditer(rf"\s{{{LONGEST_RUN + 1},}}|\S{{{LONGEST_RUN + 1},}}", text)
    cuts = [cut for run in longer for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN)]
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
