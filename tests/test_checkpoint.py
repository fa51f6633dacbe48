"""The checkpoint reader: every layout, bit for bit what the safetensors library reads, not a byte more, clear refusals.

The truth is the safetensors library and a header parser of a few lines written here.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_name
from conftest import llama_config, make_model, mla_config, stored_tensors, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_quantization import random_packed, values_by_hand, weight_by_hand
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from helpers.checkpoint import INDEX, MAX_HEADER_BYTES, SINGLE, Checkpoint
from helpers.errors import InputError
from helpers.kimi_shaped import CONFIG
from helpers.weights import Quantization

KEY = "language_model.model.layers.1.self_attn.kv_b_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
EMBEDDINGS = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.experts.0.down_proj.weight"  # packed where it is not said otherwise: 6 outputs, 96 inputs


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Bytes that a shard's header takes, and its entries."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    return 8 + length, entries


def write_raw(path: Path, header: Any, body: bytes = b"") -> None:
    """Write a safetensors file by hand, so that its header may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal dtype, shape and bits: NaN equals itself, and -0.0 isn't 0.0."""
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
    )


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return stored_tensors(make_model(llama_config()))


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A sharded Llama checkpoint, free to be damaged."""
    return write_checkpoint(tmp_path / "small-llama", llama_config(), tensors, n_shards=3)


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def set_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


# Layouts


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("n_shards", [0, 1, 3])
def test_every_layout_gives_the_tensors_that_were_stored(
    tmp_path: Path, tensors: dict[str, torch.Tensor], nested: bool, n_shards: int
) -> None:
    folder = write_checkpoint(tmp_path / "any", llama_config(), tensors, nested=nested, n_shards=n_shards)
    checkpoint = Checkpoint.open(folder)
    before = "language_model." if nested else ""
    assert checkpoint.prefix == f"{before}model."
    assert checkpoint.config.model_type == "llama"
    assert checkpoint.config.num_key_value_heads == 2
    assert set(checkpoint.shard_of) == {before + name for name in tensors}
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.tensor(before + name), tensor)


@pytest.mark.parametrize(
    "shard_name",
    [
        lambda i, n: f"model-{i + 1:05d}-of-{n:06d}.safetensors",
        lambda i, n: f"model-{i + 1}-of-{n}.safetensors",
        lambda i, n: f"model-{i + 1:05d}-of-{n:05d}.safetensors",
        lambda i, n: "abc"[i],
        lambda i, n: f"weights of part {i} (größer).bin",
    ],
    ids=["kimi", "unpadded", "padded", "no-extension", "spaces-and-umlauts"],
)
def test_shards_may_have_any_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], shard_name: Callable[[int, int], str]
) -> None:
    folder = write_checkpoint(tmp_path / "any", llama_config(), tensors, n_shards=3, shard_name=shard_name)
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.shard_of.values()) == {shard_name(i, 3) for i in range(3)}
    for name, tensor in tensors.items():
        assert same_bits(checkpoint.tensor(name), tensor)
        assert checkpoint.stored(name).shard == checkpoint.shard_of[name]


def test_an_index_wins_over_a_single_file_beside_it(folder: Path) -> None:
    """Hub folders may hold both; the index says which is meant."""
    save_file({EMBEDDINGS: torch.zeros(2, 2)}, folder / SINGLE)
    assert Checkpoint.open(folder).tensor(EMBEDDINGS).shape == (200, 48)


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_a_flat_kimi_k2_is_deepseek_v3s_architecture(tmp_path: Path, model_type: str) -> None:
    folder = write_checkpoint(tmp_path / "k2", mla_config(), {QUERY: torch.zeros(2, 2)})
    set_config(folder, model_type=model_type)
    config = Checkpoint.open(folder).config
    assert config.model_type == "deepseek_v3"
    assert (config.kv_lora_rank, config.q_lora_rank, config.rope_parameters["factor"]) == (16, 24, 64.0)


def test_kimi_k26s_published_config_keeps_rope_and_quantisation(tmp_path: Path) -> None:
    """Under ``text_config``, with the old names ``rope_scaling`` and ``type``."""
    (tmp_path / "config.json").write_text(CONFIG.read_text())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {}}))
    config = Checkpoint.open(tmp_path).config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (7168, 61, 64)
    assert config.max_position_embeddings == 262144
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"], rope["mscale_all_dim"]) == ("yarn", 64.0, 5e4, 1.0)
    assert config.quantization_config["format"] == "pack-quantized"


def test_opening_a_sharded_checkpoint_reads_no_shard(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.bytes_read == 0
    assert checkpoint.prefix == "model."


# Prefix


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "a.b.c.d."])
def test_the_prefix_is_read_off_the_keys(tmp_path: Path, prefix: str) -> None:
    names = ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.11.self_attn.q_proj.weight"]
    tensors = {prefix + name: torch.zeros(2, 2) for name in names} | {"lm_head.weight": torch.zeros(2, 2)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "any", llama_config(), tensors))
    assert checkpoint.prefix == prefix
    assert checkpoint.layer_names(11) == [f"{prefix}layers.11.self_attn.q_proj.weight"]


def test_a_layer_is_not_the_layers_whose_number_begins_with_its_own(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": torch.zeros(2, 2) for i in (1, 10, 11, 12)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "any", llama_config(), tensors))
    assert checkpoint.layer_names(1) == ["model.layers.1.self_attn.q_proj.weight"]
    assert checkpoint.layer_names(1, "mlp.") == []


def test_a_vision_tower_with_layers_of_its_own_is_not_the_decoder(tmp_path: Path) -> None:
    towers = ["vision_tower.encoder.layers.0.self_attn.q_proj.weight", "audio.layers.3.self_attn.k_proj.weight"]
    decoder = ["language_model.model.embed_tokens.weight", "language_model.model.layers.0.self_attn.q_proj.weight"]
    tensors = {name: torch.zeros(2, 2) for name in [*towers, *decoder]}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "eyes", llama_config(), tensors))
    assert checkpoint.prefix == "language_model.model."
    assert checkpoint.layer_names(0) == decoder[1:]


def test_two_decoders_are_refused_with_both_prefixes(tmp_path: Path) -> None:
    names = ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight"]
    tensors = {f"{side}.{name}": torch.zeros(2, 2) for side in ("thinker", "talker") for name in names}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "twins", llama_config(), tensors))
    with pytest.raises(InputError, match=r"twins has decoder layers under several prefixes .*'talker\.', 'thinker\.'"):
        _ = checkpoint.prefix


def test_keys_of_no_decoder_are_refused_with_an_example(tmp_path: Path) -> None:
    tensors = {"transformer.h.0.attn.c_attn.weight": torch.zeros(2, 2)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "gpt", llama_config(), tensors))
    with pytest.raises(
        InputError, match=r"No tensor of gpt .*attention.*the first of its 1 is 'transformer\.h\.0\.attn"
    ):
        _ = checkpoint.prefix


# Values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensor_is_bit_for_bit_what_the_safetensors_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    """NaN payloads, -0.0, subnormals and infinities included: nothing is converted on the way."""
    bits = torch.randint(
        0, 256, (6, 10 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 65504.0]).to(dtype)
    stored = {"a": bits.view(dtype), "odd": special, "scalar": torch.tensor(2.5, dtype=dtype), "none": special[:0]}
    folder = write_checkpoint(tmp_path / "bits", llama_config(), stored)
    theirs = load_file(folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    assert theirs.keys() == stored.keys()
    for name, tensor in theirs.items():
        assert same_bits(checkpoint.tensor(name), tensor)


def test_a_tensor_may_begin_at_any_byte(tmp_path: Path) -> None:
    """Not every writer aligns what it stores."""
    folder = write_checkpoint(tmp_path / "odd", llama_config(), {"a": torch.zeros(1)})
    entries = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "a": {"dtype": "F32", "shape": [3, 1], "data_offsets": [1, 13]},
    }
    write_raw(folder / SINGLE, entries, b"\x07" + struct.pack("<3f", 1.5, -2.0, 3.25))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensor("a").tolist() == [[1.5], [-2.0], [3.25]]
    assert checkpoint.rows("a", [2, 0]).tolist() == [[3.25], [1.5]]


def test_a_tensor_is_a_copy_that_may_be_changed(folder: Path) -> None:
    """Nothing is mapped: changing what was read changes neither the file nor the next read."""
    checkpoint = Checkpoint.open(folder)
    before = checkpoint.tensor(QUERY).clone()
    checkpoint.tensor(QUERY).zero_()
    assert torch.equal(checkpoint.tensor(QUERY), before)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 199), min_size=1, max_size=40), st.sampled_from([torch.bfloat16, torch.float32]))
def test_rows_are_those_of_the_whole_tensor(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], dtype: torch.dtype
) -> None:
    """In any order, with repeats; and each distinct row is read once."""
    folder = tmp_path_factory.getbasetemp() / f"rows-{dtype}"
    if not folder.exists():
        values = torch.randn(200, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        write_checkpoint(folder, llama_config(), {"first": torch.zeros(3), EMBEDDINGS: values})
    checkpoint = Checkpoint.open(folder)
    header = checkpoint.bytes_read
    assert same_bits(checkpoint.rows(EMBEDDINGS, ids), load_file(folder / SINGLE)[EMBEDDINGS][ids])
    assert checkpoint.bytes_read - header == len(set(ids)) * 12 * dtype.itemsize


def test_rows_take_the_ids_as_a_tensor_too(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Token ids usually are a tensor, and equal numbers in it must count as equal."""
    ids = torch.tensor([5, 199, 5, 0])
    assert same_bits(Checkpoint.open(folder).rows(EMBEDDINGS, ids), tensors[EMBEDDINGS][ids])


@pytest.mark.parametrize("outside", [-1, 200, 10**9])
def test_a_row_outside_the_matrix_is_refused_with_the_range(folder: Path, outside: int) -> None:
    """-1 isn't the last row: a tokenizer of another model is the usual reason."""
    with pytest.raises(InputError, match=rf"Row {outside} is outside '{EMBEDDINGS}', which has rows 0 to 199"):
        Checkpoint.open(folder).rows(EMBEDDINGS, [3, outside])


# Bytes


def test_bytes_read_are_headers_and_the_tensors_asked_for(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    expected = 0
    headers_seen = set()
    for name in (QUERY, "model.layers.2.mlp.up_proj.weight", "model.norm.weight", QUERY):
        shard = shard_of(folder, name)
        header_bytes, entries = header_of(shard)
        if shard not in headers_seen:
            headers_seen.add(shard)
            expected += header_bytes
        start, end = entries[name]["data_offsets"]
        checkpoint.tensor(name)
        expected += end - start
        assert checkpoint.bytes_read == expected
    assert expected < sum(shard.stat().st_size for shard in folder.glob("*.safetensors")) / 4


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, int, int]]]:
    """From the call on, every range that is read of any file: counted where files are opened, not by the reader."""
    touched: list[tuple[str, int, int]] = []

    def watched_open(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        assert mode == "rb"
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - unbuffered: no read-ahead hides in the count

        class Watched:
            def __enter__(self) -> Watched:
                return self

            def __exit__(self, *details: object) -> None:
                file.close()

            def seek(self, position: int) -> int:
                return file.seek(position)

            def read(self, n: int = -1) -> bytes:
                start = file.tell()
                data = file.read(n)
                touched.append((path.name, start, file.tell()))
                return data

            def readinto(self, buffer: Any) -> int | None:
                start = file.tell()
                got = file.readinto(buffer)
                touched.append((path.name, start, file.tell()))
                return got

        return Watched()

    def start_watching() -> list[tuple[str, int, int]]:
        monkeypatch.setattr(Path, "open", watched_open)
        return touched

    return start_watching


def test_only_that_tensors_bytes_are_read(folder: Path, watch: Callable[[], list[tuple[str, int, int]]]) -> None:
    shard = shard_of(folder, QUERY)
    header_bytes, entries = header_of(shard)
    start, end = (header_bytes + offset for offset in entries[QUERY]["data_offsets"])
    checkpoint = Checkpoint.open(folder)
    touched = watch()
    checkpoint.tensor(QUERY)
    assert touched == [(shard.name, *place) for place in ((0, 8), (8, header_bytes), (start, end))]


def test_stored_says_where_the_bytes_lie(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint.open(folder)
    for name, tensor in tensors.items():
        entry = checkpoint.stored(name)
        data = (folder / entry.shard).read_bytes()[entry.start : entry.end]
        assert data == tensor.numpy().tobytes()
        assert (entry.dtype, entry.shape, entry.nbytes) == ("F32", tuple(tensor.shape), tensor.nbytes)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["without", "with"])
def test_metadata_is_optional_and_no_tensor(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    folder = write_checkpoint(tmp_path / "any", llama_config(), {"a": torch.ones(2)})
    save_file({"a": torch.tensor([1.5, -2.0])}, folder / SINGLE, metadata=metadata)
    assert (b"__metadata__" in (folder / SINGLE).read_bytes()) == (metadata is not None)
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.shard_of) == ["a"]
    assert checkpoint.tensor("a").tolist() == [1.5, -2.0]


# Identity


def test_describe_identifies_the_files_without_a_path(folder: Path) -> None:
    (folder / "origin.json").write_text('{"weights": "random"}')
    described = Checkpoint.open(folder).describe()
    assert described == {
        "name": "small-llama",
        "model_type": "llama",
        "origin": "random",
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "index_sha256": hashlib.sha256((folder / INDEX).read_bytes()).hexdigest(),
    }


def test_weights_whose_origin_is_not_stated_are_said_to_be(folder: Path) -> None:
    assert Checkpoint.open(folder).origin == "origin not stated by the checkpoint"


@pytest.mark.parametrize("content", ["[]", '"random"', "{}", '{"weights": 5}', '{"weights": " "}', "{"])
def test_an_origin_that_is_not_in_words_is_refused(folder: Path, content: str) -> None:
    (folder / "origin.json").write_text(content)
    with pytest.raises(InputError, match=r"^origin\.json of small-llama (must|is not valid JSON)"):
        Checkpoint.open(folder)


# Refusals: folder and config


def test_a_model_without_attention_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(InputError, match=r"Model type 'mamba' .* it is no decoder with causal attention"):
        Checkpoint.open(folder)


def test_a_missing_folder_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"folder '{tmp_path}/nowhere' does not exist .*make checkpoint-"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_relative_folder_is_looked_for_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert Checkpoint.open("small-llama").folder == folder


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("x")
    with pytest.raises(InputError, match="weights' is a file, not a folder"):
        Checkpoint.open(tmp_path / "weights")


def test_a_revision_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="revision 'main' belongs to a hub id"):
        Checkpoint.open(folder, revision="main")


def test_no_weights_at_all_is_said(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(InputError, match=rf"small-llama holds neither {INDEX} nor {SINGLE}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"small-llama has no config\.json"),
        ("{oops", r"config\.json of small-llama is not valid JSON"),
        ("", r"config\.json of small-llama is not valid JSON"),
        ("\udcff", r"config\.json of small-llama is not valid JSON"),
        ("[" * 100_000, r"config\.json of small-llama is not valid JSON"),
        ("[1, 2]", r"config\.json of small-llama must be a JSON object, not list"),
        ("{}", r"config\.json of small-llama has no model_type"),
        ('{"text_config": [], "model_type": "llama"}', r"text_config in config\.json of small-llama .* not list"),
        ('{"text_config": {}, "model_type": "llama"}', r"config\.json of small-llama has no model_type"),
        ('{"model_type": "lama"}', r"no model type 'lama' \(small-llama\)\. Did you mean 'llama'\?"),
        ('{"model_type": "kimi_k3"}', r"no model type 'kimi_k3' .*Did you mean 'kimi_k2"),
        ('{"model_type": "qqqqqq"}', r"no model type 'qqqqqq' \(small-llama\)\.$"),
        ('{"model_type": ["llama"]}', r"no model type '\['llama'\]'"),
    ],
    ids=[
        "missing", "not-json", "empty", "not-utf8", "nested-too-deep", "a-list", "no-type", "text-config-a-list",
        "text-config-without-type", "near", "near-ours", "unknown", "type-a-list",
    ],
)  # fmt: skip
def test_a_bad_config_is_one_clear_sentence(folder: Path, text: str | None, message: str) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(InputError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "big"), ("num_hidden_layers", [3]), ("num_attention_heads", 7), ("rope_parameters", "yarn")],
)
def test_a_config_field_of_the_wrong_type_or_value_is_named(folder: Path, field: str, value: Any) -> None:
    set_config(folder, **{field: value})
    word = {"num_attention_heads": "number of attention heads"}.get(field, field)
    with pytest.raises(InputError, match=rf"config\.json of small-llama doesn't fit model type 'llama': .*{word}"):
        Checkpoint.open(folder)


# Refusals: index


def test_an_index_that_names_a_missing_shard_is_refused_when_the_shard_is_needed(folder: Path) -> None:
    shard = shard_of(folder, QUERY)
    shard.unlink()
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama is missing: the index names it"):
        checkpoint.tensor(QUERY)
    other = next(name for name, held in checkpoint.shard_of.items() if held != shard.name)
    assert checkpoint.tensor(other).numel() > 0


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused_with_the_nearest(folder: Path) -> None:
    misplaced = QUERY.replace("q_proj", "q_prj")
    shard = shard_of(folder, QUERY).name
    set_index(folder, **{misplaced: shard})
    expected = rf"puts '{misplaced}' into {shard}, which doesn't hold it\. Did you mean '{QUERY}'\?"
    with pytest.raises(InputError, match=expected):
        Checkpoint.open(folder).tensor(misplaced)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "sub/a", "sub\\a", "a/../b", "a\0b", "a" * 256]
)
def test_nothing_outside_the_folder_is_ever_opened(folder: Path, shard: str) -> None:
    save_file({QUERY: torch.zeros(2)}, folder.parent / "secret.safetensors")
    set_index(folder, **{QUERY: shard})
    expected = f"The index of small-llama puts '{QUERY}' into '{shard}', which is no file of the folder"
    with pytest.raises(InputError, match=re.escape(expected)):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", rf"{INDEX} of small-llama is not valid JSON"),
        ("{}", rf"{INDEX} of small-llama has no weight_map"),
        ('{"weight_map": ["a"]}', rf"{INDEX} of small-llama has no weight_map"),
        ('{"weight_map": {"a": 1}}', rf"{INDEX} of small-llama has no weight_map"),
        ('{"weight_map": {"a": ["model.safetensors"]}}', rf"{INDEX} of small-llama has no weight_map"),
    ],
)
def test_a_bad_index_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(InputError, match=message):
        Checkpoint.open(folder)


# Refusals: shards


def test_a_shard_cut_inside_its_body_is_refused_with_both_sizes(folder: Path) -> None:
    """Refused even for a tensor whose own bytes are there: the download isn't what it should be."""
    shard = shard_of(folder, QUERY)
    whole = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama is cut short \({whole - 1:,} of {whole:,} byt"):
        Checkpoint.open(folder).tensor(QUERY)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, "header-1"])
def test_a_shard_cut_inside_its_header_is_refused(folder: Path, kept: int | str) -> None:
    shard = shard_of(folder, QUERY)
    n = kept if isinstance(kept, int) else header_of(shard)[0] - 1
    shard.write_bytes(shard.read_bytes()[:n])
    where = r"inside its header \(" + f"{n:,} of " if n >= 8 else rf"\({n} bytes\)"
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama is cut short {where}.*fetch it again"):
        Checkpoint.open(folder).tensor(QUERY)


def test_a_shard_that_shrinks_after_its_header_was_read_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    shard = shard_of(folder, QUERY)
    end = checkpoint.stored(QUERY).end
    shard.write_bytes(shard.read_bytes()[: end - 1])
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama ended inside '{QUERY}'"):
        checkpoint.tensor(QUERY)


def test_a_git_lfs_pointer_is_called_by_its_name(folder: Path) -> None:
    shard = shard_of(folder, QUERY)
    shard.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 995000000\n")
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama is a Git LFS pointer.*`git lfs pull`"):
        Checkpoint.open(folder).tensor(QUERY)


def test_a_file_that_announces_an_absurd_header_is_no_safetensors_file(folder: Path) -> None:
    shard = shard_of(folder, QUERY)
    shard.write_bytes(b"PK\x03\x04" + b"\xff" * 2000)  # a pickled .bin is a zip
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama is not a safetensors file"):
        Checkpoint.open(folder).tensor(QUERY)


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02}q\x00."], ids=["zip", "before-torch-1.6"])
def test_a_pickle_is_called_by_its_name(folder: Path, start: bytes) -> None:
    shard = shard_of(folder, QUERY)
    shard.write_bytes(start + bytes(2000))
    with pytest.raises(InputError, match=rf"{shard.name} of small-llama is .* a pickle, which could run code and is n"):
        Checkpoint.open(folder).tensor(QUERY)


def test_what_torch_saves_is_called_a_pickle(folder: Path) -> None:
    shard = shard_of(folder, QUERY)
    for old_format in (False, True):
        torch.save({QUERY: torch.zeros(2)}, shard, _use_new_zipfile_serialization=not old_format)
        with pytest.raises(InputError, match="a pickle"):
            Checkpoint.open(folder).tensor(QUERY)


def test_a_shard_of_eight_exabytes_header_is_refused_at_once(folder: Path) -> None:
    shard = shard_of(folder, QUERY)
    shard.write_bytes(struct.pack("<Q", 2**63 - 1) + b"{}")
    with pytest.raises(InputError, match=r"announces a header of 9,223,372,036,854,775,807 bytes"):
        Checkpoint.open(folder).tensor(QUERY)


def test_a_shard_longer_than_its_header_says_is_refused_with_both_sizes(folder: Path) -> None:
    shard = shard_of(folder, QUERY)
    whole = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(InputError, match=rf"longer than its header says \({whole + 1:,} bytes, not {whole:,}\)"):
        Checkpoint.open(folder).tensor(QUERY)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": [0, 24], "b": [0, 24]}, r"'b' overlaps 'a'"),
        ({"a": [0, 24], "b": [20, 44]}, r"'b' overlaps 'a'"),
        ({"b": [0, 24], "a": [20, 44]}, r"'a' overlaps 'b'"),
        ({"a": [0, 24], "b": [28, 52]}, r"'b' leaves 4 bytes behind 'a'"),
        ({"a": [4, 28], "b": [28, 52]}, r"'a' leaves 4 bytes behind the header"),
    ],
)
def test_places_that_overlap_or_leave_holes_are_refused(tmp_path: Path, places: dict, message: str) -> None:
    """As the safetensors library refuses them: the format has no holes."""
    folder = write_checkpoint(tmp_path / "bad", llama_config(), {"a": torch.zeros(2, 3)})
    good = {"a": GOOD, "b": GOOD | {"data_offsets": [24, 48]}}
    write_raw(folder / SINGLE, good, bytes(48))
    assert Checkpoint.open(folder).tensor("b").shape == (2, 3)
    write_raw(folder / SINGLE, {name: GOOD | {"data_offsets": at} for name, at in places.items()}, bytes(52))
    with pytest.raises(SafetensorError):
        load_file(folder / SINGLE)
    with pytest.raises(InputError, match=rf"has an unreadable header \({message}\): fetch it again"):
        Checkpoint.open(folder)


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    """Which of the two is meant can't be known; Python's own reader would take the last."""
    folder = write_checkpoint(tmp_path / "bad", llama_config(), {"a": torch.zeros(2, 3)})
    entries = [json.dumps(GOOD | {"data_offsets": at}) for at in ([0, 24], [24, 48])]
    write_raw(folder / SINGLE, f'{{"a": {entries[0]}, "a": {entries[1]}}}'.encode(), bytes(48))
    with pytest.raises(InputError, match=r"unreadable header \(it gives 'a' twice\)"):
        Checkpoint.open(folder)


def test_the_header_limit_is_the_formats_own(folder: Path) -> None:
    """100 MB is allowed (and here cut short), a byte more is not."""
    shard = shard_of(folder, QUERY)
    shard.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES) + b"{}")
    with pytest.raises(InputError, match="cut short inside its header"):
        Checkpoint.open(folder).tensor(QUERY)
    shard.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}")
    with pytest.raises(InputError, match=r"not a safetensors file.*100,000,001 bytes"):
        Checkpoint.open(folder).tensor(QUERY)


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        b"{not json}",
        b"\xff\xfe{}",
        [1, 2],
        "text",
        {"a": 3},
        {"a": {}},
        {"a": GOOD | {"dtype": "F33"}},
        {"a": GOOD | {"dtype": ["F32"]}},
        {"a": GOOD | {"shape": "2x3"}},
        {"a": GOOD | {"shape": 6}},
        {"a": GOOD | {"shape": [2, 4]}},
        {"a": GOOD | {"shape": [-2, -3]}},
        {"a": GOOD | {"data_offsets": [0]}},
        {"a": GOOD | {"data_offsets": [-24, 0]}},
        {"a": GOOD | {"data_offsets": [24, 0]}},
        {"a": GOOD | {"data_offsets": ["0", "24"]}},
        {"a": GOOD | {"data_offsets": [0.0, 24.0]}},
    ],
    ids=[
        "not-json", "not-utf8", "list", "text", "entry-a-number", "entry-empty", "unknown-dtype", "dtype-a-list",
        "shape-text", "shape-a-number", "shape-and-bytes-disagree", "negative-shape", "one-offset", "before-the-body",
        "backwards", "offsets-text", "offsets-with-a-point",
    ],
)  # fmt: skip
def test_a_header_of_garbage_is_refused(tmp_path: Path, header: Any) -> None:
    folder = write_checkpoint(tmp_path / "bad", llama_config(), {"a": torch.zeros(2, 3)})
    write_raw(folder / SINGLE, {"a": GOOD}, bytes(24))
    assert Checkpoint.open(folder).tensor("a").shape == (2, 3)
    write_raw(folder / SINGLE, header, bytes(24))
    with pytest.raises(InputError, match=rf"{SINGLE} of bad has an unreadable header"):
        Checkpoint.open(folder).tensor("a")


# Refusals: tensors


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.uint8, torch.int8])
def test_numbers_that_stand_for_others_are_refused_by_name_and_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Their bytes read as numbers would be plausible garbage."""
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}.get(dtype) or (
        str(dtype).removeprefix("torch.").replace("uint", "U").replace("int", "I")
    )
    folder = write_checkpoint(tmp_path / "packed", llama_config(), {EMBEDDINGS: torch.ones(4, 4).to(dtype)})
    checkpoint = Checkpoint.open(folder)
    for read in (lambda: checkpoint.tensor(EMBEDDINGS), lambda: checkpoint.rows(EMBEDDINGS, [0])):
        with pytest.raises(InputError, match=rf"'{EMBEDDINGS}' is stored as {name}, .*BF16"):
            read()


def test_an_unknown_tensor_offers_the_nearest_name(mla_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(mla_checkpoint)
    with pytest.raises(InputError, match=rf"small-kimi has no tensor '.*kv_b_prj.*'\. Did you mean '{KEY}'\?"):
        checkpoint.tensor(KEY.replace("kv_b_proj", "kv_b_prj"))
    with pytest.raises(InputError, match=r"small-kimi has no tensor 'zzz'\.$"):
        checkpoint.rows("zzz", [0])


# Packed INT4


def packing(**changes: Any) -> dict[str, Any]:
    """Kimi K2.6's ``quantization_config``, its options for weights changed."""
    config = json.loads(CONFIG.read_text())["text_config"]["quantization_config"]
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def write_packed(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None, n_shards: int = 0
) -> Path:
    """A Llama's folder with the packed weight :data:`DOWN`, its stored tensors changed."""
    tensors = {QUERY: torch.randn(48, 48), **random_packed(DOWN, 6, 96), "model.norm.weight": torch.ones(48)}
    change(tensors)
    write_checkpoint(folder / "packed", llama_config(), tensors, n_shards=n_shards)
    set_config(folder / "packed", quantization_config=packing())
    return folder / "packed"


def by_hand(n_out: int = 6, n_in: int = 96) -> torch.Tensor:
    packed, scale, _ = random_packed(DOWN, n_out, n_in).values()
    return weight_by_hand(packed, scale)


@pytest.mark.parametrize("n_shards", [0, 1, 3], ids=["one-file", "one-shard", "a-shard-each"])
def test_a_packed_weight_is_exactly_what_a_plain_loop_unpacks(tmp_path: Path, n_shards: int) -> None:
    checkpoint = Checkpoint.open(write_packed(tmp_path, n_shards=n_shards))
    assert same_bits(checkpoint.tensor(DOWN), by_hand())
    assert len({entry.shard for entry in checkpoint.weight(DOWN).stored}) == max(n_shards, 1)


def test_a_weight_says_what_it_is_made_of(tmp_path: Path) -> None:
    """From headers: the shape is the weight's own, the places are those of the stored tensors."""
    folder = write_packed(tmp_path)
    checkpoint = Checkpoint.open(folder)
    header_bytes, entries = header_of(folder / SINGLE)
    weight = checkpoint.weight(DOWN)
    assert (weight.packed, weight.shape, weight.dtype, weight.fault) == (True, (6, 96), torch.float32, "")
    assert [entry.name for entry in weight.stored] == [f"{DOWN}_packed", f"{DOWN}_scale", f"{DOWN}_shape"]
    assert [entry.nbytes for entry in weight.stored] == [6 * 12 * 4, 6 * 3 * 2, 8]
    for entry in weight.stored:
        assert [entry.start - header_bytes, entry.end - header_bytes] == entries[entry.name]["data_offsets"]
    plain = checkpoint.weight(QUERY)
    assert (plain.packed, plain.shape, plain.dtype, plain.fault) == (False, (48, 48), torch.float32, "")
    assert plain.stored == (checkpoint.stored(QUERY),)
    assert checkpoint.bytes_read == header_bytes


def test_a_packed_weights_bytes_are_read_and_no_other(
    tmp_path: Path, watch: Callable[[], list[tuple[str, int, int]]]
) -> None:
    folder = write_packed(tmp_path)
    checkpoint = Checkpoint.open(folder)
    header_bytes, entries = header_of(folder / SINGLE)
    touched = watch()
    checkpoint.tensor(DOWN)
    parts = [entries[DOWN + ending]["data_offsets"] for ending in ("_packed", "_scale", "_shape")]
    assert sorted(touched) == sorted((SINGLE, header_bytes + start, header_bytes + end) for start, end in parts)
    assert checkpoint.bytes_read == header_bytes + 6 * 12 * 4 + 6 * 3 * 2 + 8


def test_a_layer_lists_a_packed_weight_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_packed(tmp_path))
    assert checkpoint.layer_names(1) == [DOWN]
    assert checkpoint.layer_names(1, "mlp.") == [DOWN]
    assert checkpoint.layer_names(0) == [QUERY]


def test_a_weight_that_is_there_is_not_packed_whatever_lies_beside_it(tmp_path: Path) -> None:
    """Other formats store a ``weight_scale`` beside the weight: it stays a tensor of its own."""

    def fp8(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{DOWN}_packed"], tensors[f"{DOWN}_shape"]
        tensors[DOWN] = torch.ones(6, 96).to(torch.float8_e4m3fn)

    checkpoint = Checkpoint.open(write_packed(tmp_path, fp8))
    assert sorted(checkpoint.layer_names(1)) == [DOWN, f"{DOWN}_scale"]
    with pytest.raises(InputError, match=rf"'{DOWN}' is stored as F8_E4M3, but its scales '{DOWN}_scale_inv' are miss"):
        checkpoint.tensor(DOWN)


def test_an_expert_that_is_neither_packed_nor_ignored_is_refused(tmp_path: Path) -> None:
    """Router and embeddings are plain and match no pattern either: that is as Kimi K2.6 is stored."""
    router = "model.layers.1.mlp.gate.weight"

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for ending in ("_packed", "_scale", "_shape"):
            del tensors[DOWN + ending]
        tensors |= {DOWN: torch.ones(6, 96), router: torch.ones(4, 96), EMBEDDINGS: torch.ones(4, 4)}

    folder = write_packed(tmp_path, plain)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(InputError, match=rf"'{DOWN}' is stored as F32, but config\.json says that experts are packed"):
        checkpoint.tensor(DOWN)
    assert checkpoint.tensor(router).shape == (4, 96)
    assert checkpoint.tensor(EMBEDDINGS).shape == (4, 4)
    for pattern in (r"re:.*experts\.\d+\.down_proj", DOWN.removesuffix(".weight")):
        set_config(folder, quantization_config=packing() | {"ignore": [pattern]})
        assert torch.equal(Checkpoint.open(folder).tensor(DOWN), torch.ones(6, 96))


@pytest.mark.parametrize("pattern", [r"re:.*mlp\.experts.*", DOWN.removesuffix(".weight")])
def test_a_packed_weight_of_an_ignored_module_is_refused(tmp_path: Path, pattern: str) -> None:
    folder = write_packed(tmp_path)
    set_config(folder, quantization_config=packing() | {"ignore": [pattern]})
    with pytest.raises(InputError, match=rf"'{DOWN}' is packed, but config\.json lists its module as one that isn't"):
        Checkpoint.open(folder).tensor(DOWN)


names = st.sampled_from(["lm_head", "model.lm_head", "model.layers.1.mlp.gate", "model.layers.1.self_attn.q_proj"])
patterns = (
    names | names.map(re.escape).map("re:{}".format) | st.sampled_from(["re:.*gate", "re:lm", "re:.*head$", "re:"])
)


@given(names, st.lists(patterns, max_size=3))
def test_ignored_is_what_compressed_tensors_ignores(module: str, ignore: list[str]) -> None:
    quantization = Quantization.of({"quantization_config": packing() | {"ignore": ignore}})
    assert quantization.ignores(f"{module}.weight") == any(match_name(module, pattern) for pattern in ignore)


@pytest.mark.parametrize("size", [8, 64, 96])
def test_the_config_says_how_large_groups_are(tmp_path: Path, size: int) -> None:
    packed, _, shape = random_packed(DOWN, 6, 192).values()
    scale = (0.01 + torch.rand(6, 192 // size)).bfloat16()
    stored = {f"{DOWN}_packed": packed, f"{DOWN}_scale": scale, f"{DOWN}_shape": shape}
    folder = write_packed(tmp_path, lambda tensors: tensors.update(stored))
    set_config(folder, quantization_config=packing(group_size=size))
    widened = torch.repeat_interleave(scale.double(), size, dim=1)
    expected = torch.tensor(values_by_hand(packed)).double() * widened
    assert torch.equal(Checkpoint.open(folder).tensor(DOWN).double(), expected)


@pytest.mark.parametrize("value", [0.0, -0.01, float("nan"), float("inf")])
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path, ending: str, value: float) -> None:
    if ending == "_scale":
        folder = write_packed(tmp_path, lambda tensors: tensors[f"{DOWN}_scale"][2, 1:].fill_(value))
    else:
        folder = write_fp8(tmp_path, lambda tensors: tensors[f"{DOWN}_scale_inv"][1, :2].fill_(value))
    name = folder.name
    with pytest.raises(InputError, match=rf"'{DOWN}{ending}' of {name} holds 2 scales that are no positive numbers"):
        Checkpoint.open(folder).tensor(DOWN)


@pytest.mark.parametrize("ending", ["_packed", "_scale", "_shape"])
def test_a_missing_part_of_a_packed_weight_is_named(tmp_path: Path, ending: str) -> None:
    checkpoint = Checkpoint.open(write_packed(tmp_path, lambda tensors: tensors.pop(DOWN + ending)))
    assert checkpoint.layer_names(1) == [DOWN]
    with pytest.raises(InputError, match=rf"'{DOWN}' of packed is packed INT4, but '{DOWN}{ending}' is missing: fetch"):
        checkpoint.tensor(DOWN)


@pytest.mark.parametrize(
    ("ending", "dtype", "message"),
    [
        ("_packed", torch.int64, "is stored as I64, not I32"),
        ("_packed", torch.uint8, "is stored as U8, not I32"),
        ("_scale", torch.float32, "is stored as F32, not BF16"),
        ("_scale", torch.float16, "is stored as F16, not BF16"),
        ("_shape", torch.int64, "is stored as I64, not I32"),
    ],
)
def test_a_part_of_another_dtype_is_named(tmp_path: Path, ending: str, dtype: torch.dtype, message: str) -> None:
    """Scales of FP16 have as many bytes as those of BF16."""

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN + ending] = tensors[DOWN + ending].to(dtype)

    checkpoint = Checkpoint.open(write_packed(tmp_path, convert))
    with pytest.raises(InputError, match=rf"of packed can't be read: '{DOWN}{ending}' {message}: only packed INT4"):
        checkpoint.tensor(DOWN)


@pytest.mark.parametrize(
    ("ending", "shape", "message"),
    [
        ("_packed", (72,), r"has shape \[72\], not \[outputs, inputs / 8\]"),
        ("_packed", (2, 3, 12), r"has shape \[2, 3, 12\], not \[outputs, inputs / 8\]"),
        ("_packed", (12, 6), r"has shape \[12, 6\], not \[outputs, inputs / 8\] of inputs in groups of 32"),
        ("_scale", (3, 6), r"has shape \[3, 6\], not \[6, 3\], one scale for 32 inputs of '.*weight_packed'"),
        ("_scale", (18,), r"has shape \[18\], not \[6, 3\]"),
        ("_scale", (6, 1), r"has shape \[6, 1\], not \[6, 3\]"),
        ("_shape", (3,), r"has shape \[3\], not \[2\]: it must hold outputs and inputs"),
        ("_shape", (1, 2), r"has shape \[1, 2\], not \[2\]"),
    ],
)
def test_parts_whose_shapes_do_not_fit_are_named(
    tmp_path: Path, ending: str, shape: tuple[int, ...], message: str
) -> None:
    """From headers: the weight's own bytes aren't touched. One scale a row would broadcast."""

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN + ending] = torch.ones(shape, dtype=tensors[DOWN + ending].dtype)

    checkpoint = Checkpoint.open(write_packed(tmp_path, reshape))
    before = checkpoint.bytes_read
    with pytest.raises(InputError, match=rf"of packed can't be read: '{DOWN}{ending}' {message}"):
        checkpoint.tensor(DOWN)
    assert checkpoint.bytes_read == before


@pytest.mark.parametrize("said", [[6, 95], [96, 6], [12, 48], [0, 0]])
def test_a_weight_shape_that_says_something_else_is_refused_with_both(tmp_path: Path, said: list[int]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}_shape"] = torch.tensor(said, dtype=torch.int32)

    expected = f"'{DOWN}_shape' of packed says {said}, but '{DOWN}_packed' holds [6, 96]"
    with pytest.raises(InputError, match=re.escape(expected)):
        Checkpoint.open(write_packed(tmp_path, change)).tensor(DOWN)


@pytest.mark.parametrize("where", ["text", "top"])
def test_the_packing_may_be_described_under_text_config_or_at_the_top(tmp_path: Path, where: str) -> None:
    folder = write_packed(tmp_path)
    text = json.loads((folder / "config.json").read_text())
    quantization = text.pop("quantization_config")
    outer = {"model_type": "kimi_k25", "text_config": text}
    (outer if where == "top" else text)["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(outer))
    assert torch.equal(Checkpoint.open(folder).tensor(DOWN), by_hand())
    quantization["format"] = "int-quantized"
    (folder / "config.json").write_text(json.dumps(outer))
    with pytest.raises(InputError, match="gives format as 'int-quantized', not 'pack-quantized'"):
        Checkpoint.open(folder).tensor(DOWN)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "has no quantization_config that says how"),
        ({}, "has no quantization_config that says how"),
        ("int4", "quantization_config in config.json is no object but str"),
        (FP8, "gives format as None, not 'pack-quantized'"),
        (packing() | {"format": "marlin-24"}, "gives format as 'marlin-24', not 'pack-quantized'"),
        (packing() | {"config_groups": {}}, "quantization_config in config.json has no config_groups"),
        (packing() | {"config_groups": [{}]}, "quantization_config in config.json has no config_groups"),
        (packing() | {"config_groups": {"group_0": {}}}, "group_0 of .* says nothing of weights"),
        (packing() | {"config_groups": {"group_0": None}}, "group_0 of .* says nothing of weights"),
        (packing(num_bits=8), "group_0 of .* gives num_bits as 8, not 4"),
        (packing(num_bits="4"), "group_0 of .* gives num_bits as '4', not 4"),
        (packing(group_size=12), "group_0 of .* gives group_size as 12, not as a multiple of 8 such as 32"),
        (packing(group_size=0), "group_0 of .* gives group_size as 0, not .* as 32"),
        (packing(group_size="32"), "group_0 of .* gives group_size as '32', not .* as 32"),
        (packing(group_size=None), "group_0 of .* gives group_size as None, not .* as 32"),
        (packing() | {"ignore": "lm_head"}, "ignore of .* is no list of module names"),
        (packing() | {"ignore": ["re:("]}, r"ignore of .* holds 're:\(', which is no pattern .*"),
        (packing(strategy="channel"), "group_0 of .* gives strategy as 'channel', not 'group'"),
        (packing(symmetric=False), "group_0 of .* gives symmetric as False, not True"),
        (packing(type="float"), "group_0 of .* gives type as 'float', not 'int'"),
        (packing(actorder="group"), "group_0 of .* gives actorder as 'group', not None"),
    ],
)
def test_packing_that_the_config_does_not_describe_as_kimis_is_refused(
    tmp_path: Path, quantization: Any, message: str
) -> None:
    """Each of them would unpack into plausible garbage; what isn't packed is read all the same."""
    folder = write_packed(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(InputError, match=rf"of packed can't be read: '{DOWN}' is packed, and .*{message}\. Only Kimi"):
        checkpoint.tensor(DOWN)
    assert checkpoint.tensor(QUERY).shape == (48, 48)


def test_a_second_group_of_another_packing_is_refused(tmp_path: Path) -> None:
    """Which tensor belongs to which group isn't read, so all groups must be packed alike."""
    folder = write_packed(tmp_path)
    quantization = packing()
    quantization["config_groups"]["group_1"] = packing(num_bits=8)["config_groups"]["group_0"]
    set_config(folder, quantization_config=quantization)
    with pytest.raises(InputError, match=r"group_1 of quantization_config in config\.json gives num_bits as 8, not 4"):
        Checkpoint.open(folder).tensor(DOWN)


def test_rows_of_a_packed_weight_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_packed(tmp_path))
    for read in (lambda: checkpoint.rows(DOWN, [0]), lambda: checkpoint.plain(DOWN)):
        with pytest.raises(InputError, match=rf"'{DOWN}' of packed is quantised \('{DOWN}_shape'\): .*BF16"):
            read()


# FP8 in blocks


def fp8_by_hand(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each number times its block's, one by one, in float64; then rounded to float32 once."""
    rows, scales = values.double().tolist(), scale.double().tolist()
    exact = [[v * scales[i // block[0]][j // block[1]] for j, v in enumerate(row)] for i, row in enumerate(rows)]
    return torch.tensor(exact, dtype=torch.float64).float()


def write_fp8(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
    shape: tuple[int, int] = (200, 300),
    block: tuple[int, int] = (128, 128),
    **config: Any,
) -> Path:
    """A Llama's folder with the FP8 weight :data:`DOWN`: random bytes, none of them e4m3's NaN, and random scales."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    grid = [-(-n // size) for n, size in zip(shape, block, strict=True)]
    tensors = {
        DOWN: values.to(torch.uint8).view(torch.float8_e4m3fn),
        f"{DOWN}_scale_inv": torch.rand(grid, generator=generator) * 0.01 + 1e-4,
        QUERY: torch.randn(48, 48),
    }
    change(tensors)
    write_checkpoint(folder / "scaled", llama_config(), tensors, n_shards=2)
    set_config(folder / "scaled", quantization_config=FP8 | {"weight_block_size": list(block)} | config)
    return folder / "scaled"


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (127, 129), (200, 300), (256, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_weight_is_what_a_plain_loop_makes_of_it(
    tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Edges that are no multiple of a block included."""
    scales: list[torch.Tensor] = []

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}_scale_inv"] = tensors[f"{DOWN}_scale_inv"].to(dtype)
        scales.extend((tensors[DOWN], tensors[f"{DOWN}_scale_inv"]))

    checkpoint = Checkpoint.open(write_fp8(tmp_path, convert, shape))
    assert same_bits(checkpoint.tensor(DOWN), fp8_by_hand(scales[0], scales[1], (128, 128)))
    assert checkpoint.layer_names(1) == [DOWN]
    weight = checkpoint.weight(DOWN)
    assert (weight.scaled, weight.shape, weight.dtype, weight.fault) == (True, shape, torch.float32, "")


@pytest.mark.parametrize("block", [(64, 32), (1, 300), (200, 1), (7, 5)])
def test_the_config_says_how_large_blocks_are(tmp_path: Path, block: tuple[int, int]) -> None:
    checkpoint = Checkpoint.open(write_fp8(tmp_path, block=block))
    values, scale = (checkpoint._values(entry) for entry in checkpoint.weight(DOWN).stored)
    assert same_bits(checkpoint.tensor(DOWN), fp8_by_hand(values, scale, block))


def test_an_fp8_weight_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Where no edge is cut, which is all that transformers' own conversion takes."""
    checkpoint = Checkpoint.open(write_fp8(tmp_path, shape=(256, 384)))
    values, scale = (checkpoint._values(entry) for entry in checkpoint.weight(DOWN).stored)
    theirs = Fp8Dequantize(None)._dequantize_one(values, scale)
    assert same_bits(checkpoint.tensor(DOWN), theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}_scale_inv"), "is stored as F8_E4M3, but its scales '.*_scale_inv' are missing"),
        (lambda t: t.update({DOWN: torch.ones(200, 300)}), "is stored as F32, not F8_E4M3, and yet has scales"),
        (lambda t: t.update({DOWN: t[DOWN].view(torch.float8_e5m2)}), "is stored as F8_E5M2, not F8_E4M3"),
        (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(3, 2)}), r"has shape \[3, 2\], not \[2, 3\], one scale"),
        (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(())}), r"has shape \[\], not \[2, 3\]"),
        (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 3).half()}), "is stored as F16, not F32 or BF16"),
        (lambda t: t.update({DOWN: t[DOWN][None]}), r"has shape \[1, 200, 300\], not \[outputs, inputs\]"),
    ],
    ids=["no-scales", "plain-with-scales", "e5m2", "scales-turned", "one-scale", "scales-f16", "three-dimensions"],
)
def test_an_fp8_weight_that_does_not_fit_together_is_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    checkpoint = Checkpoint.open(write_fp8(tmp_path, change))
    with pytest.raises(InputError, match=rf"A weight of scaled can't be read: '{DOWN}\w*' {message}"):
        checkpoint.tensor(DOWN)
    assert checkpoint.tensor(QUERY).shape == (48, 48)


def test_scales_without_their_weight_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_fp8(tmp_path, lambda tensors: tensors.pop(DOWN)))
    with pytest.raises(InputError, match=rf"'{DOWN}' of scaled is FP8 with scales, but '{DOWN}' is missing"):
        checkpoint.tensor(DOWN)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "gives quant_method as 'gptq', not 'fp8'"),
        ({"fmt": "e5m2"}, "gives fmt as 'e5m2', not 'e4m3'"),
        ({"weight_block_size": None}, r"gives weight_block_size as None, not as \[128, 128\]"),
        ({"weight_block_size": [128]}, r"gives weight_block_size as \[128\]"),
        ({"weight_block_size": [0, 128]}, r"gives weight_block_size as \[0, 128\]"),
        ({"weight_block_size": [128.0, 128]}, r"gives weight_block_size as \[128\.0, 128\]"),
    ],
)
def test_blocks_that_the_config_does_not_describe_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    folder = write_fp8(tmp_path)
    set_config(folder, quantization_config=FP8 | config)
    with pytest.raises(InputError, match=rf"'{DOWN}' has scales of blocks, and .*{message}"):
        Checkpoint.open(folder).tensor(DOWN)


def test_rows_of_an_fp8_weight_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"'{DOWN}' of scaled is quantised \('{DOWN}_scale_inv'\)"):
        Checkpoint.open(write_fp8(tmp_path)).rows(DOWN, [0])
