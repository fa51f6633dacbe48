"""Reading single tensors out of a safetensors checkpoint of any size: only the bytes that are asked for.

A checkpoint is a folder with ``config.json`` and either ``model.safetensors.index.json`` and its shards or one
``model.safetensors``. Format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header length, a JSON
header with dtype, shape and byte offsets a tensor, then the bytes). The reader here, unlike the safetensors library's,
counts the bytes it reads, and copies them instead of mapping the file, so that resident memory is what was asked for.

A weight is one stored tensor or, where it is quantised, two or three: see :class:`~helpers.weights.Weight`.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from helpers.errors import InputError, did_you_mean
from helpers.files import refuse_lfs_pointer
from helpers.paths import locate, portable
from helpers.quantization import dequantize_fp8, dequantize_int4, unpack_int4
from helpers.strict_json import parse_json
from helpers.weights import DTYPES, PACKED, PACKED_MEMBER, PLAIN, SCALES, Quantization, StoredTensor, Weight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ORIGIN = "origin.json"

# Model types whose text model transformers knows under another name: Kimi K2 is DeepSeek-V3's architecture.
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}
# How torch.save's files begin: a zip archive, or before torch 1.6 a pickle of protocol 2.
PICKLES = (b"PK\x03\x04", b"\x80\x02")
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


@dataclass
class Checkpoint:
    """One checkpoint folder. Opening it reads the config and the index only; headers are read as they are needed."""

    folder: Path
    raw_config: dict[str, Any]
    config: PreTrainedConfig
    origin: str  # of the weights, in words
    shard_of: dict[str, str]  # tensor name -> shard file name
    bytes_read: int = 0  # of shards: tensors and headers
    headers: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)

    @classmethod
    def open(cls, source: str | Path, revision: str | None = None) -> Checkpoint:
        """Open a checkpoint folder; a relative path is looked for here, then in the project root.

        Raises:
            InputError: no such folder, no or unreadable config, an unknown model type, no weights, a bad index; or a
                ``revision``, which a folder doesn't have.
        """
        folder = locate(str(source))
        if revision:
            raise InputError(f"revision '{revision}' belongs to a hub id, not to a folder: leave it out.")
        if not folder.is_dir():
            fault = "is a file, not a folder" if folder.exists() else f"does not exist (looked for {folder})"
            raise InputError(
                f"Checkpoint folder '{source}' {fault}: name a folder with config.json and safetensors files, such as "
                "checkpoints/kimi-mini, or make one with `make checkpoint-kimi-shaped` or `make checkpoint-smollm2`."
            )
        raw_config = _read_json(folder / "config.json", "a checkpoint needs its config.json")
        config = text_config(raw_config, folder.name)
        checkpoint = cls(folder, raw_config, config, _read_origin(folder / ORIGIN), shard_of={})
        if (folder / INDEX).exists():
            checkpoint.shard_of = _read_index(folder / INDEX)
        elif (folder / SINGLE).exists():
            checkpoint.shard_of = dict.fromkeys(checkpoint.header(SINGLE), SINGLE)
        else:
            raise InputError(f"{folder.name} holds neither {INDEX} nor {SINGLE}: the weights are missing.")
        return checkpoint

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def prefix(self) -> str:
        """What stands before ``layers.0.`` in this checkpoint's keys, such as ``"language_model.model."``.

        Raises:
            InputError: no key looks like a decoder layer's, or several prefixes do.
        """
        matches = (re.match(r"((?:[^.]+\.)*?)layers\.\d+\.self_attn\.", name) for name in self.shard_of)
        found = Counter(match[1] for match in matches if match)
        # a vision tower has layers too, but no token embeddings
        with_embeddings = [prefix for prefix in found if f"{prefix}embed_tokens.weight" in self.shard_of]
        prefixes = with_embeddings or list(found)
        if len(prefixes) == 1:
            return prefixes[0]
        if not prefixes:
            first = f"; the first of its {len(self.shard_of)} is '{min(self.shard_of)}'" if self.shard_of else ""
            raise InputError(
                f"No tensor of {self.name} is named like a decoder layer's attention (…layers.N.self_attn.…){first}."
            )
        raise InputError(f"{self.name} has decoder layers under several prefixes ({', '.join(map(repr, prefixes))}).")

    @cached_property
    def quantization(self) -> Quantization:
        """What the config says of stored weights."""
        return Quantization.of(self.raw_config)

    def layer_names(self, layer: int, part: str = "") -> list[str]:
        """Names of the weights of one decoder layer, or of its ``part`` such as ``"self_attn."``.

        A quantised weight counts as one, under the name that it would have in plain numbers.
        """
        start = f"{self.prefix}layers.{layer}.{part}"
        names = (self._weight_of(name) for name in self.shard_of if name.startswith(start))
        return list(dict.fromkeys(names))

    def _weight_of(self, name: str) -> str:
        """Name of the weight that the stored tensor ``name`` belongs to."""
        if name.endswith(".weight" + SCALES):
            return name.removesuffix(SCALES)
        member = PACKED_MEMBER.fullmatch(name)
        # beside a weight, such a tensor is another format's: it stays one of its own, which nothing reads
        return member[1] if member and member[1] not in self.shard_of else name

    def members(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that the weight ``name`` is made of, those that are missing included."""
        if name + SCALES in self.shard_of and name.endswith(".weight"):
            return (name, name + SCALES)
        packed = tuple(name + ending for ending in PACKED)
        stored = any(member in self.shard_of and self._weight_of(member) == name for member in packed)
        return packed if stored else (name,)

    def weight(self, name: str) -> Weight:
        """Say which stored tensors the weight ``name`` is made of and where they lie; reads headers only.

        Raises:
            InputError: a quantised weight lacks one of its tensors; or as :meth:`stored`, for any of them.
        """
        members = self.members(name)
        missing = [member for member in members if member not in self.shard_of]
        if len(members) > 1 and missing:
            kind = "FP8 with scales" if len(members) == 2 else "packed INT4"
            raise InputError(
                f"'{name}' of {self.name} is {kind}, but '{missing[0]}' is missing: fetch the index and its shards "
                "again."
            )
        return Weight(name, tuple(self.stored(member) for member in members), self.quantization)

    def stored(self, name: str) -> StoredTensor:
        """Say where the tensor ``name`` lies; reads its shard's header the first time.

        Raises:
            InputError: the checkpoint has no such tensor, or index and shard disagree about it.
        """
        if name not in self.shard_of:
            raise InputError(f"{self.name} has no tensor '{name}'.{did_you_mean(name, self.shard_of)}")
        shard = self.shard_of[name]
        header = self.header(shard)
        if name not in header:
            raise InputError(
                f"The index of {self.name} puts '{name}' into {shard}, which doesn't hold it."
                f"{did_you_mean(name, header)} The index and the shards are of different downloads: fetch both again."
            )
        return header[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Read one weight in its shape; only the bytes of what it is made of are read.

        A plain tensor comes in its stored dtype, a quantised weight in float32: a packed one exactly, an FP8 one with
        each product rounded once.

        Raises:
            InputError: no such tensor; one whose stored numbers stand for others in a way that can't be read; or a
                quantised weight with a part missing or unfit, a scale that isn't a positive number, or a config that
                doesn't say how it is stored.
        """
        weight = self.weight(name)
        if weight.fault:
            raise InputError(
                f"A weight of {self.name} can't be read: {weight.fault} Fetch weights and config.json again, from one "
                "place, or use a BF16 checkpoint."
            )
        if weight.packed:
            packed, scale, shape = weight.stored
            said = self._values(shape).tolist()
            if said != list(weight.shape):
                raise InputError(
                    f"'{shape.name}' of {self.name} says {said}, but '{packed.name}' holds {list(weight.shape)}: they "
                    "are of different downloads, so fetch both again."
                )
            return dequantize_int4(unpack_int4(self._values(packed)), self._scales(scale))
        if weight.scaled:
            values, scale = weight.stored
            assert self.quantization.block is not None  # or the weight has a fault
            return dequantize_fp8(self._values(values), self._scales(scale), self.quantization.block)
        return self._values(weight.stored[0])

    def _scales(self, stored: StoredTensor) -> torch.Tensor:
        """Read scales, and refuse what isn't a positive number: it would be plausible garbage, or nothing."""
        scales = self._values(stored)
        bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        if bad:
            raise InputError(
                f"'{stored.name}' of {self.name} holds {bad:,} scales that are no positive numbers: fetch its shard "
                "again."
            )
        return scales

    def _values(self, stored: StoredTensor) -> torch.Tensor:
        return self._read(stored, stored.start, stored.nbytes).view(DTYPES[stored.dtype]).reshape(stored.shape)

    def rows(self, name: str, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Read selected rows of a matrix [rows, width] -> [len(ids), width]; each distinct row is read once.

        Raises:
            InputError: as :meth:`plain`, or an id outside the matrix.
        """
        stored = self.plain(name)
        ids = [int(i) for i in ids]
        outside = [i for i in ids if not 0 <= i < stored.shape[0]]
        if outside:
            raise InputError(f"Row {outside[0]} is outside '{name}', which has rows 0 to {stored.shape[0] - 1}.")
        width = stored.nbytes // stored.shape[0]
        distinct = sorted(set(ids))
        rows = {i: self._read(stored, stored.start + i * width, width) for i in distinct}
        return torch.stack([rows[i] for i in ids]).view(DTYPES[stored.dtype]).reshape(len(ids), *stored.shape[1:])

    def describe(self) -> dict[str, Any]:
        """Identity of the checkpoint for a manifest: names and digests, no path."""
        digests = {}
        for key, file in (("config_sha256", "config.json"), ("index_sha256", INDEX)):
            path = self.folder / file
            digests[key] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
        return {"name": portable(self.folder), "model_type": self.config.model_type, "origin": self.origin, **digests}

    def header(self, shard: str) -> dict[str, StoredTensor]:
        """The header of one shard, checked: tensor name -> where it lies.

        Raises:
            InputError: the shard is missing, a Git LFS pointer, cut short, or not a safetensors file.
        """
        if shard not in self.headers:
            self.headers[shard] = self._read_header(shard)
        return self.headers[shard]

    def _read_header(self, shard: str) -> dict[str, StoredTensor]:
        path = self.folder / shard
        where = f"{shard} of {self.name}"
        if not path.is_file():
            raise InputError(f"{where} is missing: the index names it, so fetch it into the folder.")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            refuse_lfs_pointer(path, start)
            if len(start) < 8:
                raise InputError(f"{where} is cut short ({size} bytes): fetch it again.")
            (length,) = struct.unpack("<Q", start)
            if start.startswith(PICKLES):
                raise InputError(
                    f"{where} is not a safetensors file but a pickle, which could run code and is never read: convert "
                    "the checkpoint to safetensors."
                )
            if length > MAX_HEADER_BYTES:
                raise InputError(f"{where} is not a safetensors file: it announces a header of {length:,} bytes.")
            if 8 + length > size:
                raise InputError(
                    f"{where} is cut short inside its header ({size:,} of {8 + length:,} bytes): fetch it again."
                )
            text = file.read(length)
        try:
            entries = parse_json(text)
            entries.pop("__metadata__", None)
            header = {name: _stored_tensor(name, shard, entry, 8 + length) for name, entry in entries.items()}
            _check_places(list(header.values()), 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{where} has an unreadable header ({error}): fetch it again.") from None
        end = max((stored.end for stored in header.values()), default=8 + length)
        if end > size:
            raise InputError(f"{where} is cut short ({size:,} of {end:,} bytes): fetch it again.")
        if end < size:
            raise InputError(f"{where} is longer than its header says ({size:,} bytes, not {end:,}): fetch it again.")
        self.bytes_read += 8 + length
        return header

    def plain(self, name: str) -> StoredTensor:
        """Like :meth:`stored`, for a tensor whose stored numbers stand for themselves.

        Raises:
            InputError: as :meth:`stored`, or the tensor is quantised or packed.
        """
        members = self.members(name)
        if len(members) > 1:
            raise InputError(
                f"'{name}' of {self.name} is quantised ('{members[-1]}'): it can be read as a whole, but has no rows "
                "to read one by one. Use a checkpoint that stores it in BF16, F16 or F32."
            )
        stored = self.stored(name)
        if stored.dtype not in PLAIN:
            raise InputError(
                f"'{name}' is stored as {stored.dtype}, which stands for other numbers: its rows can't be read. Use a "
                "checkpoint that stores it in BF16, F16 or F32."
            )
        return stored

    def _read(self, stored: StoredTensor, start: int, nbytes: int) -> torch.Tensor:
        """Read a byte range of a shard straight into a fresh tensor: no mapping, no second copy."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        with (self.folder / stored.shard).open("rb") as file:
            file.seek(start)
            got = file.readinto(buffer.numpy().data)
        if got != nbytes:
            raise InputError(f"{stored.shard} of {self.name} ended inside '{stored.name}': fetch it again.")
        self.bytes_read += nbytes
        return buffer


def _read_json(path: Path, why: str) -> dict[str, Any]:
    where = f"{path.name} of {path.parent.name}"
    if not path.is_file():
        raise InputError(f"{path.parent.name} has no {path.name}: {why}.")
    content = path.read_bytes()
    refuse_lfs_pointer(path, content)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise InputError(f"{where} is not valid JSON ({error}): fetch it again.") from None
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a JSON object, not {type(value).__name__}.")
    return value


def _read_origin(path: Path) -> str:
    """What ``make checkpoint-…`` says of the weights that it wrote."""
    if not path.exists():
        return "origin not stated by the checkpoint"
    weights = _read_json(path, "").get("weights")
    if not isinstance(weights, str) or not weights.strip():
        raise InputError(
            f"{path.name} of {path.parent.name} must say in words what the weights are: correct or remove it."
        )
    return weights


def _read_index(path: Path) -> dict[str, str]:
    weight_map = _read_json(path, "a sharded checkpoint needs its index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(
            f"{path.name} of {path.parent.name} has no weight_map from tensor names to shards: fetch it again."
        )
    for name, shard in weight_map.items():
        # nothing outside the folder is ever opened; and no file system has longer names
        if shard in ("", ".", "..") or re.search(r"[/\\\0]", shard) or len(shard.encode()) > 255:
            raise InputError(
                f"The index of {path.parent.name} puts '{name}' into '{shard}', which is no file of the folder."
            )
    return weight_map


def _check_places(stored: list[StoredTensor], data_start: int) -> None:
    """Refuse tensors that overlap or leave holes: the format has none, so one of the places is wrong.

    Raises:
        ValueError: names the two neighbours.
    """
    end, before = data_start, "the header"
    for entry in sorted(stored, key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            fault = "overlaps" if entry.start < end else f"leaves {entry.start - end:,} bytes behind"
            raise ValueError(f"'{entry.name}' {fault} {before}")
        end, before = entry.end, f"'{entry.name}'"


def text_config(raw: dict[str, Any], name: str) -> PreTrainedConfig:
    """Build the transformers config of the text model, whether it stands alone or under ``text_config``.

    The stored ``quantization_config`` stays on it as a plain dictionary.
    """
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise InputError(f"text_config in config.json of {name} must be an object, not {type(text).__name__}.")
    model_type = text.get("model_type")
    if model_type is None:
        raise InputError(f"config.json of {name} has no model_type: it doesn't say which architecture this is.")
    known = SAME_ARCHITECTURE.get(str(model_type), str(model_type))
    if known not in CONFIG_MAPPING:
        raise InputError(
            f"transformers knows no model type '{model_type}' ({name})."
            f"{did_you_mean(str(model_type), [*CONFIG_MAPPING, *SAME_ARCHITECTURE])}"
        )
    fields = {key: value for key, value in text.items() if key != "model_type"}
    try:
        config = CONFIG_MAPPING[known](**fields)
    except Exception as error:  # transformers raises a different type for each kind of bad field
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        reason = reason.strip().rstrip(".")
        raise InputError(f"config.json of {name} doesn't fit model type '{model_type}': {reason}.") from error
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"):
        if not hasattr(config, key):
            raise InputError(
                f"Model type '{model_type}' ({name}) has no {key}: it is no decoder with causal attention."
            )
        value = getattr(config, key)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"config.json of {name} gives {key} as {value!r}: it must be a whole number from 1.")
    return config


def _stored_tensor(name: str, shard: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"'{name}' has unknown dtype {dtype}")
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(
            f"'{name}' has shape {list(shape)} at bytes {start} to {end}, which are no whole numbers from 0"
        )
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"'{name}' of shape {list(shape)} and dtype {dtype} can't lie at bytes {start} to {end}")
    return StoredTensor(name, shard, dtype, shape, data_start + start, data_start + end)
