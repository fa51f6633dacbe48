"""Hidden states are what the model itself feeds the layer, and what can't be made is refused before anything runs."""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import llama_config, make_model, stored_tensors, trace, write_checkpoint
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn

import helpers.memory
from helpers.checkpoint import INDEX, Checkpoint
from helpers.errors import InputError
from helpers.inputs import (
    check_input,
    input_kind,
    prepare_input,
    prepare_inputs,
    random_embeddings,
    read_text,
    text_hidden_states,
)
from helpers.kimi_shaped import CONFIG
from helpers.parameters import Parameters
from helpers.paths import project_root

WORDS = [f"w{i}" for i in range(200)]
EMBEDDINGS = "model.embed_tokens.weight"


def add_tokenizer(folder: Path) -> Path:
    """A tokenizer whose token ids can be read off the words: ``w17`` is 17."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids_for(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return make_model(llama_config())


@pytest.fixture
def folder(tmp_path: Path, llama: nn.Module) -> Path:
    """A small Llama that can read text, free to be damaged."""
    return add_tokenizer(write_checkpoint(tmp_path / "small-llama", llama.config, stored_tensors(llama)))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(" ".join(WORDS[i] for i in ids_for(100)))
    return path


def parameters(folder: Path, **changes: Any) -> Parameters:
    settings = {"checkpoint": str(folder), "seq_len": 30, "continuation": 10, "n_sink": 1, "n_recent": 1, "budget": 4}
    return Parameters.check(settings | {name: str(v) if isinstance(v, Path) else v for name, v in changes.items()})


def check(folder: Path, **changes: Any) -> None:
    check_input(parameters(folder, **changes), Checkpoint.open(folder), torch.float32, "cpu")


# Text


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", ["mla", "llama"])
def test_text_hidden_states_are_what_the_full_models_attention_reads(
    tmp_path: Path, mla_model: nn.Module, llama: nn.Module, family: str, layer: int
) -> None:
    """Through dense and mixture-of-experts layers; every position, relative to the largest value there."""
    model = {"mla": mla_model, "llama": llama}[family]
    checkpoint = Checkpoint.open(
        write_checkpoint(tmp_path / "small", model.config, stored_tensors(model), nested=family == "mla", n_shards=2)
    )
    ids = ids_for(70)
    (ours,) = text_hidden_states(checkpoint, layer, [ids], torch.float32, "cpu")
    truth = trace(model, torch.tensor([ids]))[layer].attention_in
    assert ours.shape == truth.shape
    assert float(((ours - truth).abs().amax(-1) / truth.abs().amax(-1)).max()) < 2e-5


def test_bfloat16_hidden_states_are_those_of_the_model_to_its_precision(folder: Path, llama: nn.Module) -> None:
    ids = ids_for(70)
    (ours,) = text_hidden_states(Checkpoint.open(folder), 2, [ids], torch.bfloat16, "cpu")
    assert ours.dtype == torch.bfloat16
    truth = trace(llama, torch.tensor([ids]))[2].attention_in
    error = (ours.float() - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert 1e-4 < error.mean() < 0.03


def test_layer_0_reads_embedding_rows_and_the_norm_only(folder: Path) -> None:
    """Not the whole embedding matrix, which is 2.3 GB in Kimi K2.6."""
    checkpoint = Checkpoint.open(folder)
    headers = checkpoint.bytes_read
    text_hidden_states(checkpoint, 0, [[5, 9, 5, 5, 0]], torch.float32, "cpu")
    assert checkpoint.bytes_read - headers == (3 + 1) * 48 * 4


def test_prepared_text_is_the_texts_first_tokens_through_the_model(
    folder: Path, text_file: Path, llama: nn.Module
) -> None:
    prepared = prepare_input(parameters(folder, text=text_file, layer=1), Checkpoint.open(folder), torch.float32, "cpu")
    ids = ids_for(100)[:40]
    assert prepared.tokens is not None
    assert prepared.tokens.ids == ids
    assert prepared.prompt_tokens(30) == [WORDS[i] for i in ids[:30]]
    truth = trace(llama, torch.tensor([ids]))[1].attention_in
    torch.testing.assert_close(prepared.hidden_states, truth, rtol=1e-4, atol=1e-4)
    assert prepared.description == "the first 40 tokens of story.txt"
    assert prepared.text_sha256 == hashlib.sha256(text_file.read_bytes()).hexdigest()


# Random


def test_random_embeddings_are_seeded_normal_values() -> None:
    x = random_embeddings(500, 400, 0.5, 7, torch.float32)
    assert x.shape == (1, 500, 400)
    assert torch.equal(x, random_embeddings(500, 400, 0.5, 7, torch.float32))
    other = random_embeddings(500, 400, 0.5, 8, torch.float32)
    assert abs(float((x * other).mean())) < 0.01 * 0.5**2
    # 200,000 values: mean, spread and tails of a normal distribution within five standard errors
    z = x.double() / 0.5
    assert abs(float(z.mean())) < 5 / 200_000**0.5
    assert float(z.std()) == pytest.approx(1, abs=5 / 400_000**0.5)
    assert float((z.abs() > 2).double().mean()) == pytest.approx(0.0455, abs=0.0025)


def test_random_embeddings_are_rounded_once_and_leave_torchs_own_seed_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    narrow = random_embeddings(8, 16, 0.02, 1, torch.bfloat16)
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(narrow, random_embeddings(8, 16, 0.02, 1, torch.float32).bfloat16())


def test_prepared_random_input_needs_no_tokenizer_and_no_weights(tmp_path: Path) -> None:
    """The published demo's input: it stands in for what attention reads, at any layer."""
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "part", llama_config(), {name: torch.zeros(2, 2)}))
    headers = checkpoint.bytes_read
    prepared = prepare_input(
        parameters(tmp_path / "part", embedding_std=0.02, seed=5, layer=2), checkpoint, torch.bfloat16, "cpu"
    )
    assert checkpoint.bytes_read == headers
    assert prepared.hidden_states.shape == (1, 40, 48)
    assert torch.equal(prepared.hidden_states, random_embeddings(40, 48, 0.02, 5, torch.bfloat16))
    assert (prepared.tokens, prepared.text_sha256, prepared.prompt_tokens(30)) == (None, None, None)
    assert prepared.description == "random embeddings, normal with standard deviation 0.02, seed 5"


@pytest.mark.parametrize(
    ("file", "asked", "kind"),
    [
        ("tokenizer.json", "auto", "text"),
        ("tiktoken.model", "auto", "text"),
        (None, "auto", "random"),
        ("tokenizer.json", "random", "random"),
        (None, "text", "text"),
    ],
)
def test_auto_is_text_where_there_is_a_tokenizer(folder: Path, file: str | None, asked: str, kind: str) -> None:
    (folder / "tokenizer.json").unlink()
    if file:
        (folder / file).touch()
    assert input_kind(parameters(folder, input=asked), Checkpoint.open(folder)) == kind


# Where text comes from


def test_the_builtin_text_is_a_long_topic_that_python_carries() -> None:
    name, text = read_text("builtin")
    assert text == pydoc_data.topics.topics[name.removeprefix("the Python reference's topic '").removesuffix("'")]
    assert len(text) > 20_000


def test_a_text_file_is_read_whole_and_named_without_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "grüße.txt"
    path.write_text("  Grüße 中 \n\n <tag>\t", encoding="utf-8")
    assert read_text(str(path)) == ("grüße.txt", "  Grüße 中 \n\n <tag>\t")


def test_a_relative_text_is_looked_for_here_and_then_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one inside the project is named from the project."""
    monkeypatch.chdir(tmp_path)
    expected = (project_root() / "helpers/errors.py").read_text()
    assert read_text("helpers/errors.py") == ("helpers/errors.py", expected)
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers/errors.py").write_text("another")
    assert read_text("helpers/errors.py") == ("errors.py", "another")


def test_a_folder_gives_its_first_txt_file_by_name(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    assert read_text(str(tmp_path)) == ("b.txt", "text of b.txt")


@pytest.mark.parametrize("content", ["", " ", "\n\n\t \n"], ids=["nothing", "space", "blank-lines"])
def test_an_empty_text_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(InputError, match=r"Text file '.*empty\.txt' is empty.*text=builtin"):
        read_text(str(tmp_path / "empty.txt"))


def test_an_empty_text_in_a_folder_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty\.txt.* is empty"):
        read_text(str(tmp_path))


def test_a_missing_text_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"'nowhere\.txt' does not exist \(looked for {project_root()}/nowhere\.txt"):
        read_text("nowhere.txt")
    with pytest.raises(InputError, match=r"nowhere/x\.txt' does not exist"):
        read_text(str(tmp_path / "nowhere/x.txt"))


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(InputError, match=rf"The folder '{tmp_path}' holds no \.txt file"):
        read_text(str(tmp_path))


def test_a_text_that_is_not_utf8_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("abc größe".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin1\.txt' is not UTF-8 \(invalid .* at byte 6\)"):
        read_text(str(tmp_path / "latin1.txt"))


def test_later_files_that_are_empty_short_or_repeated_are_left_out(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    long = " ".join(WORDS[i] for i in ids_for(60))
    other = " ".join(WORDS[i] for i in reversed(ids_for(60)))
    contents = {"a": long, "b": "", "c": "w1 w2", "d": long + " w3", "e": other}
    for name, content in contents.items():
        (texts / f"{name}.txt").write_text(content)
    found = prepare_inputs(parameters(folder, input="text", text=texts), Checkpoint.open(folder), torch.float32, "cpu")
    assert [given.description.split()[-1] for given in found] == ["a.txt", "e.txt"]


# Refusals before anything runs


def test_a_text_of_just_enough_tokens_is_taken_and_one_less_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text(" ".join(WORDS[:40]))
    check(folder, text=path)
    path.write_text(" ".join(WORDS[:39]))
    with pytest.raises(InputError, match=r"short\.txt has 39 tokens, and seq_len \+ continuation asks for 40"):
        check(folder, text=path)


@pytest.mark.parametrize("kind", ["text", "random"])
def test_more_tokens_than_the_models_positions_are_refused_with_the_limit(folder: Path, kind: str) -> None:
    check(folder, input="random", seq_len=502)
    with pytest.raises(
        InputError,
        match=r"seq_len 503 \+ continuation 10 is more than the 512 positions of small-llama: .*at most 502",
    ):
        check(folder, input=kind, seq_len=503)


def test_a_continuation_that_alone_is_too_long_is_what_must_be_lowered(folder: Path) -> None:
    with pytest.raises(InputError, match="lower continuation"):
        check(folder, input="random", seq_len=30, continuation=600)


def test_text_without_a_tokenizer_is_refused(folder: Path, text_file: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"small-llama has no tokenizer .*use input=random"):
        check(folder, input="text", text=text_file)


@pytest.mark.parametrize("text", ["nowhere.txt", "empty"])
def test_a_bad_text_is_refused_before_anything_runs(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match=r"does not exist|is empty"):
        check(folder, text=str(tmp_path / text))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write_checkpoint(folder, llama_config(), tensors)


def test_missing_embeddings_are_refused_before_anything_runs(folder: Path, text_file: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_token.weight"] = tensors.pop(EMBEDDINGS)

    rewrite(folder, rename)
    with pytest.raises(InputError, match=rf"no tensor '{EMBEDDINGS}'\. Did you mean 'model\.embed_token\.weight'\?"):
        check(folder, text=text_file)


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.zeros(200, 32), r"shape \[200, 32\]"),
        (torch.zeros(48, 200), r"shape \[48, 200\]"),
        (torch.zeros(200, 48).to(torch.float8_e4m3fn), "F8_E4M3"),
    ],
    ids=["narrow", "transposed", "quantised"],
)
def test_embeddings_that_do_not_fit_are_refused_before_anything_runs(
    folder: Path, text_file: Path, embeddings: torch.Tensor, message: str
) -> None:
    rewrite(folder, lambda tensors: tensors.update({EMBEDDINGS: embeddings}))
    with pytest.raises(InputError, match=rf"'{EMBEDDINGS}'.*{message}"):
        check(folder, text=text_file)


def test_a_tokenizer_of_another_model_is_refused_by_row(folder: Path, text_file: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({EMBEDDINGS: torch.zeros(50, 48)}))
    with pytest.raises(InputError, match=rf"'{EMBEDDINGS}'"):
        prepare_input(parameters(folder, text=text_file), Checkpoint.open(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("layer", "name"),
    [(0, "model.layers.0.input_layernorm.weight"), (2, "model.layers.1.mlp.up_proj.weight")],
)
def test_a_tensor_that_the_text_needs_is_looked_for_before_anything_runs(
    folder: Path, text_file: Path, layer: int, name: str
) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(InputError, match=rf"{name.split('.')[3]}"):
        check(folder, text=text_file, layer=layer)


def free_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(helpers.memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=n_bytes))


def test_layers_below_that_do_not_fit_memory_are_refused(
    folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 has no layer below, and random input runs none."""
    free_memory(monkeypatch, 1000)
    check(folder, text=text_file, layer=0)
    check(folder, input="random", layer=1)
    with pytest.raises(InputError, match=r"Text at layer 1 needs the layers below .*layer 0 of small-llama takes"):
        check(folder, text=text_file, layer=1)
    free_memory(monkeypatch, 1_000_000)
    check(folder, text=text_file, layer=2)
    free_memory(monkeypatch, 20_064 * 4)  # its parameters alone
    with pytest.raises(InputError, match="use a layer up to 0, or input=random"):
        check(folder, text=text_file, layer=2)


def test_kimi_k26_above_layer_0_is_refused_with_the_numbers(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known from config and headers alone: layer 0 has 497.5 million parameters, 1.0 GB in BF16."""
    folder = add_tokenizer(tmp_path)
    (folder / "config.json").write_text(CONFIG.read_text())
    name = "language_model.model.embed_tokens.weight"
    entry = {"dtype": "BF16", "shape": [163840, 7168], "data_offsets": [0, 163840 * 7168 * 2]}
    header = json.dumps({name: entry}).encode()
    with (folder / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 163840 * 7168 * 2)  # a hole: 2.3 GB that take no space
    layer_0 = "language_model.model.layers.0.self_attn.o_proj.weight"
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: "a.safetensors", layer_0: "b.safetensors"}}))
    free_memory(monkeypatch, 500_000_000)
    numbers = r"layer 0 of .* takes 1\.0 GB in bfloat16 where 0\.5 GB are free: use a layer up to 0"
    with pytest.raises(InputError, match=rf"Text at layer 30 needs .*{numbers}"):
        check_input(parameters(folder, text=text_file, layer=30), Checkpoint.open(folder), torch.bfloat16, "cpu")
