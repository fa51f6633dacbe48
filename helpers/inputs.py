"""Hidden states that a layer's attention reads: seeded random embeddings, or a text as the model itself sees it."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from helpers.capture import attention_implementation
from helpers.checkpoint import Checkpoint
from helpers.corpus import documents
from helpers.errors import InputError
from helpers.layer import (
    check_layers_below,
    load_decoder_layer,
    load_input_norm,
    rotary_embedding,
)
from helpers.memory import free_bytes
from helpers.parameters import Parameters
from helpers.paths import locate, portable
from helpers.products import Float32Products
from helpers.tokenizer import Tokens, first_tokens, has_tokenizer, load_tokenizer


@dataclass(frozen=True)
class LayerInput:
    """What one attention layer is given. ``hidden_states`` [1, L, hidden]; ``tokens`` is None for random input.

    ``description`` says in words what the input is, for reports; ``text_sha256`` is None for random input.
    """

    hidden_states: torch.Tensor
    tokens: Tokens | None
    description: str
    text_sha256: str | None = None

    def prompt_tokens(self, seq_len: int) -> list[str] | None:
        """Texts of the first ``seq_len`` tokens, None for random input."""
        return self.tokens.texts[:seq_len] if self.tokens else None


def input_kind(parameters: Parameters, ckpt: Checkpoint) -> str:
    """Resolve ``input=auto``: text where the checkpoint has a tokenizer, else random."""
    if parameters.input != "auto":
        return parameters.input
    return "text" if has_tokenizer(ckpt.folder) else "random"


def prepare_input(parameters: Parameters, ckpt: Checkpoint, dtype: torch.dtype, device: str) -> LayerInput:
    """Make the hidden states that the attention of ``parameters.layer`` reads, ``seq_len + continuation`` tokens.

    Raises:
        InputError: everything :func:`check_input` refuses.
    """
    check_input(parameters, ckpt, dtype, device)
    n_tokens = parameters.seq_len + parameters.continuation
    if input_kind(parameters, ckpt) == "random":
        hidden_states = random_embeddings(
            n_tokens, ckpt.config.hidden_size, parameters.embedding_std, parameters.seed, dtype
        )
        description = (
            f"random embeddings, normal with standard deviation {parameters.embedding_std:g}, seed {parameters.seed}"
        )
        return LayerInput(hidden_states.to(device), None, description)
    name, text = read_text(parameters.text)
    tokens = _encode(ckpt, name, text, n_tokens)
    (hidden_states,) = text_hidden_states(ckpt, parameters.layer, [tokens.ids], dtype, device)
    return LayerInput(hidden_states, tokens, f"the first {n_tokens} tokens of {name}", _sha256(text))


def prepare_inputs(parameters: Parameters, ckpt: Checkpoint, dtype: torch.dtype, device: str) -> list[LayerInput]:
    """Make up to ``n_texts`` inputs of ``seq_len + continuation`` tokens: one window a document, or draws.

    The first is that of :func:`prepare_input`. Documents that are too short, or begin as one before, are left out; the
    layers below run once for all. Draw number i has the seed ``seed + i``.

    Raises:
        InputError: everything :func:`check_input` refuses.
    """
    first = prepare_input(parameters, ckpt, dtype, device)
    if first.tokens is None:
        seeds = [(parameters.seed + i) % 2**64 for i in range(1, parameters.n_texts)]
        later = [dataclasses.replace(parameters, seed=seed) for seed in seeds]
        return [first, *(prepare_input(other, ckpt, dtype, device) for other in later)]
    n_tokens = parameters.seq_len + parameters.continuation
    tokenizer = load_tokenizer(ckpt.folder)
    found: list[tuple[str, str, Tokens]] = []
    seen = {tuple(first.tokens.ids)}
    for name, text in read_texts(parameters.text)[1:]:
        if len(seen) == parameters.n_texts:
            break
        tokens = first_tokens(tokenizer, text, n_tokens)
        if len(tokens.ids) == n_tokens and tuple(tokens.ids) not in seen:
            seen.add(tuple(tokens.ids))
            found.append((name, text, tokens))
    hidden_states = text_hidden_states(ckpt, parameters.layer, [tokens.ids for *_, tokens in found], dtype, device)
    return [first] + [
        LayerInput(states, tokens, f"the first {n_tokens} tokens of {name}", _sha256(text))
        for states, (name, text, tokens) in zip(hidden_states, found, strict=True)
    ]


def both_inputs(parameters: Parameters, ckpt: Checkpoint, dtype: torch.dtype, device: str) -> dict[str, LayerInput]:
    """Return the run's own input and, where it can be made, the other kind beside it, as ``text`` and ``random
    embeddings``; the run's own comes first.

    Raises:
        InputError: everything :func:`check_input` refuses of the run's own.
    """
    names = {"text": "text", "random": "random embeddings"}
    own = input_kind(parameters, ckpt)
    given = {names[own]: prepare_input(parameters, ckpt, dtype, device)}
    other = "random" if own == "text" else "text"
    asked = dataclasses.replace(parameters, input=other, text="builtin")
    with suppress(InputError):  # no tokenizer, no embeddings, too short a text: then there is one input
        given[names[other]] = prepare_input(asked, ckpt, dtype, device)
    return given


def check_input(parameters: Parameters, ckpt: Checkpoint, dtype: torch.dtype, device: str) -> None:
    """Refuse, before anything is computed, an input that can't be made.

    Raises:
        InputError: more tokens than the model's maximum; no tokenizer; a text file missing, empty or too short; layers
            below that don't fit memory.
    """
    n_tokens = parameters.seq_len + parameters.continuation
    longest = ckpt.config.max_position_embeddings
    if n_tokens > longest:
        room = longest - parameters.continuation
        remedy = f"seq_len to at most {room}" if room > 0 else "continuation"
        raise InputError(
            f"seq_len {parameters.seq_len} + continuation {parameters.continuation} is more than the {longest} "
            f"positions of {ckpt.name}: lower {remedy}."
        )
    if input_kind(parameters, ckpt) == "random" and parameters.text != "builtin":
        raise InputError(
            f"text '{parameters.text}' is named, but the input is random embeddings: set input=text, with a "
            "checkpoint that has a tokenizer, or leave text out."
        )
    if input_kind(parameters, ckpt) == "random" and parameters.embedding_std * 8 > torch.finfo(dtype).max:
        raise InputError(
            f"embedding_std {parameters.embedding_std:g} draws values beyond what {parameters.dtype} holds "
            f"({torch.finfo(dtype).max:g}): lower embedding_std, or use dtype=bfloat16 or dtype=float32."
        )
    if input_kind(parameters, ckpt) == "text":
        name, text = read_text(parameters.text)
        _encode(ckpt, name, text, n_tokens)
        try:
            embeddings = ckpt.plain(f"{ckpt.prefix}embed_tokens.weight")
        except InputError as error:
            raise InputError(f"Text needs the embeddings. {error} Or use input=random, which needs none.") from None
        expected = (ckpt.config.vocab_size, ckpt.config.hidden_size)
        if embeddings.shape != expected:
            raise InputError(f"'{embeddings.name}' has shape {list(embeddings.shape)}, not {list(expected)}.")
        check_layers_below(ckpt, parameters.layer, n_tokens, dtype, free_bytes(device))


def random_embeddings(n_tokens: int, hidden_size: int, std: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal(0, ``std``) values [1, n_tokens, hidden_size], the same for a seed on every device.

    They stand in for the hidden states that attention reads, without the norm before it: that is what the published
    demo ran on.
    """
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, n_tokens, hidden_size, generator=generator) * std).to(dtype)


def read_text(source: str) -> tuple[str, str]:
    """Return (name, text) of a ``text`` parameter: the first of :func:`read_texts`."""
    return read_texts(source, at_most=1)[0]


def read_texts(source: str, at_most: int | None = None) -> list[tuple[str, str]]:
    """Return (name, text) of each document of a ``text`` parameter: ``builtin``, a file, or a folder's .txt files.

    ``builtin`` are the documents that Python carries and no model of this project was trained on: topics of the
    language reference, then sources of modules, the longest first. Files come in the order of their names.

    Raises:
        InputError: no such file, no .txt file in the folder, a file that isn't UTF-8, or the first one is empty.
    """
    if source == "builtin":
        held_out = [document for document in documents() if document.held_out]
        held_out.sort(key=lambda document: (not document.is_topic, -len(document.text)))
        return [(document.description, document.text) for document in held_out[:at_most]]
    path = locate(source)
    if path.is_dir():
        files = sorted(file for file in path.glob("*.txt") if file.is_file())
        if not files:
            raise InputError(f"The folder '{source}' holds no .txt file: name a text file, or text=builtin.")
        found = [_read_file(locate(str(file)), f"{source}/{file.name}") for file in files[:at_most]]
        _refuse_empty(found[0][1], f"{source}/{files[0].name}")
        return found
    name, text = _read_file(path, source)
    _refuse_empty(text, source)
    return [(name, text)]


def _read_file(path: Path, source: str) -> tuple[str, str]:
    if not path.is_file():
        fault = "is no regular file" if path.exists() else f"does not exist (looked for {path})"
        raise InputError(f"Text file '{source}' {fault}: name a text file, or text=builtin.")
    try:
        text = path.read_bytes().decode("utf-8")  # line ends as they are: tokens depend on them
    except UnicodeDecodeError as error:
        raise InputError(
            f"Text file '{source}' is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8."
        ) from None
    return portable(path), text


def _refuse_empty(text: str, source: str) -> None:
    if not text.strip():
        raise InputError(f"Text file '{source}' is empty: name one with text in it, or text=builtin.")


def text_hidden_states(
    ckpt: Checkpoint, layer: int, texts: list[list[int]], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Return [1, L, hidden] for each text's token ids: exactly what the attention of ``layer`` reads of it.

    Embedding rows, the decoder layers below one after another (read, run over every text, free), and this layer's
    input norm.
    """
    name = f"{ckpt.prefix}embed_tokens.weight"
    streams = []
    for ids in texts:
        rows = ckpt.rows(name, ids)
        if not rows.isfinite().all():
            raise InputError(f"'{name}' of {ckpt.name} holds NaN or infinite values: fetch its shard again.")
        streams.append(rows.to(device=device, dtype=dtype)[None])
    rotary = rotary_embedding(ckpt, device)
    with torch.no_grad(), Float32Products():
        for below in tqdm(range(layer if texts else 0), desc="Running the layers below", unit="layer", leave=False):
            decoder_layer: Any = load_decoder_layer(ckpt, below, dtype, device)
            with attention_implementation(decoder_layer.self_attn):  # torch's own builds the matrix where widths differ
                for i, stream in enumerate(streams):
                    positions = torch.arange(stream.shape[1], device=device)[None]
                    streams[i] = decoder_layer(
                        stream,
                        attention_mask=None,
                        position_ids=positions,
                        position_embeddings=rotary(stream, positions),
                    )
            del decoder_layer
        norm = load_input_norm(ckpt, layer, dtype, device)
        return [norm(stream) for stream in streams]


def _encode(ckpt: Checkpoint, name: str, text: str, n_tokens: int) -> Tokens:
    tokens = first_tokens(load_tokenizer(ckpt.folder), text, n_tokens)
    if len(tokens.ids) < n_tokens:
        raise InputError(
            f"{name} has {len(tokens.ids):,} tokens, and seq_len + continuation asks for {n_tokens:,}: take a longer "
            "text, or lower seq_len or continuation."
        )
    return tokens


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
