"""What a weight is stored as: one plain tensor, FP8 with scales of blocks, or packed INT4 with scales of groups.

Which of them is decided weight by weight, from the stored dtype and the tensors beside it. The config's
``quantization_config`` says how large blocks and groups are, and which modules are not packed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from helpers.quantization import PER_INT32

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# What stands for its own value. Anything else is packed or scaled, and would be plausible garbage if taken as it is.
PLAIN = ("F64", "F32", "F16", "BF16")
FP8 = "F8_E4M3"
# What a packed weight is stored as, in this order: the endings behind ``.weight``, and the dtype of each.
PACKED = {"_packed": "I32", "_scale": "BF16", "_shape": "I32"}
PACKED_MEMBER = re.compile(r"(.*\.weight)_(packed|scale|shape)")
# Ending of an FP8 weight's scales, as DeepSeek-V3 has them; they are multiplied with, whatever the name says.
SCALES = "_scale_inv"
# The one kind of packing that can be read: Kimi K2's. With ``actorder`` the inputs would lie in another order.
PACKING = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: ``dtype`` as the header spells it, ``start`` and ``end`` as bytes of the shard's file."""

    name: str
    shard: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Quantization:
    """What ``config.json`` says of stored weights.

    ``block`` are the rows and columns of an FP8 weight that share a scale, ``group`` the inputs of a packed weight that
    do; None where ``block_fault`` or ``group_fault`` says why weights of that kind can't be read. ``ignore`` are the
    modules that the packing leaves out.
    """

    block: tuple[int, int] | None
    block_fault: str
    group: int | None
    group_fault: str
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Quantization:
        """Read a whole ``config.json``'s, that of the text model or else the top one."""
        text = raw.get("text_config", raw)
        found = text.get("quantization_config") or raw.get("quantization_config")
        if not found:
            fault = "config.json has no quantization_config that says how"
            return cls(None, fault, None, fault)
        if not isinstance(found, dict):
            fault = f"quantization_config in config.json is no object but {type(found).__name__}"
            return cls(None, fault, None, fault)
        block, block_fault = _block(found)
        group, group_fault = _group(found)
        ignore = found.get("ignore") or []
        if group is not None and (fault := _ignore_fault(ignore)):
            return cls(block, block_fault, None, fault)
        return cls(block, block_fault, group, group_fault, tuple(ignore) if group else ())

    def ignores(self, name: str) -> bool:
        """Whether the packing leaves the weight ``name`` out, by compressed-tensors' rule for a module's name."""
        module = name.removesuffix(".weight")
        return any(
            re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module
            for pattern in self.ignore
        )


def _block(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, str]:
    if config.get("quant_method") != "fp8":
        return (
            None,
            f"quantization_config in config.json gives quant_method as {config.get('quant_method')!r}, not 'fp8'",
        )
    if config.get("fmt", "e4m3") != "e4m3":
        return None, f"quantization_config in config.json gives fmt as {config['fmt']!r}, not 'e4m3'"
    size = config.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        return None, f"quantization_config in config.json gives weight_block_size as {size!r}, not as [128, 128]"
    return (size[0], size[1]), ""


def _group(config: Mapping[str, Any]) -> tuple[int | None, str]:
    if config.get("format") != "pack-quantized":
        return (
            None,
            f"quantization_config in config.json gives format as {config.get('format')!r}, not 'pack-quantized'",
        )
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return None, "quantization_config in config.json has no config_groups"
    sizes = []
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            return None, f"{key} of quantization_config in config.json says nothing of weights"
        for option, value in PACKING.items():
            given = weights.get(option)
            if type(given) is not type(value) or given != value:  # True is 1, but symmetric isn't a number
                return None, f"{key} of quantization_config in config.json gives {option} as {given!r}, not {value!r}"
        size = weights.get("group_size")
        if type(size) is not int or size < PER_INT32 or size % PER_INT32:
            fault = f"{key} of quantization_config in config.json gives group_size as {size!r}"
            return None, f"{fault}, not as a multiple of {PER_INT32} such as 32"
        sizes.append(size)
    if len(set(sizes)) > 1:
        return None, f"the groups of quantization_config in config.json have several sizes ({sizes})"
    return sizes[0], ""


def _ignore_fault(ignore: Any) -> str:
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        return "ignore of quantization_config in config.json is no list of module names"
    for pattern in ignore:
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            return f"ignore of quantization_config in config.json holds {pattern!r}, which is no pattern ({error})"
    return ""


@dataclass(frozen=True)
class Weight:
    """A weight and the stored tensors it is made of.

    That is the one of its name; or two, FP8 numbers and their scales (``scaled``); or the three of :data:`PACKED`.
    """

    name: str
    stored: tuple[StoredTensor, ...]
    quantization: Quantization

    @property
    def scaled(self) -> bool:
        return len(self.stored) == 2

    @property
    def packed(self) -> bool:
        return len(self.stored) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that are stored, whatever they are packed into; from headers alone, if there's no fault."""
        first = self.stored[0].shape
        return (*first[:-1], first[-1] * PER_INT32) if self.packed and first else first

    @property
    def dtype(self) -> torch.dtype:
        """What the weight is read in."""
        return DTYPES[self.stored[0].dtype] if len(self.stored) == 1 else torch.float32

    @property
    def config_fault(self) -> str:
        """Why the config doesn't say how this weight is stored: then it is so for every weight stored so; or ``""``."""
        if self.packed and self.quantization.group is None:
            return (
                f"'{self.name}' is packed, and {self.quantization.group_fault}. Only Kimi K2's packing can be read "
                "(pack-quantized: symmetric INT4 in groups)."
            )
        if self.scaled and self.quantization.block is None:
            return f"'{self.name}' has scales of blocks, and {self.quantization.block_fault}."
        return ""

    @property
    def fault(self) -> str:
        """Why the stored tensors can't be this weight, as far as headers and the config tell; or ``""``."""
        if self.packed:
            return self.config_fault or self._packed_fault()
        return self.config_fault or self._scaled_fault() if self.scaled else self._plain_fault()

    def _plain_fault(self) -> str:
        dtype = self.stored[0].dtype
        if dtype == FP8:
            return f"'{self.name}' is stored as {dtype}, but its scales '{self.name}{SCALES}' are missing."
        if dtype not in PLAIN:
            return f"'{self.name}' is stored as {dtype}, which stands for other numbers in a way that can't be read."
        if self.quantization.group and EXPERT.fullmatch(self.name) and not self.quantization.ignores(self.name):
            return (
                f"'{self.name}' is stored as {dtype}, but config.json says that experts are packed, and its list of "
                "modules that are not (ignore) doesn't hold this one."
            )
        return ""

    def _scaled_fault(self) -> str:
        values, scales = self.stored
        if values.dtype != FP8:
            return f"'{values.name}' is stored as {values.dtype}, not {FP8}, and yet has scales ('{scales.name}')."
        block = self.quantization.block
        assert block is not None  # or the config has a fault
        if scales.dtype not in ("F32", "BF16"):
            return f"'{scales.name}' is stored as {scales.dtype}, not F32 or BF16."
        if len(values.shape) != 2:
            return f"'{values.name}' has shape {list(values.shape)}, not [outputs, inputs]."
        expected = [-(-n // size) for n, size in zip(values.shape, block, strict=True)]
        if list(scales.shape) != expected:
            return (
                f"'{scales.name}' has shape {list(scales.shape)}, not {expected}, one scale for {block[0]}×{block[1]} "
                f"of '{values.name}'."
            )
        return ""

    def _packed_fault(self) -> str:
        packed, scale, shape = self.stored
        group = self.quantization.group
        assert group is not None  # or the config has a fault
        if self.quantization.ignores(self.name):
            return f"'{self.name}' is packed, but config.json lists its module as one that isn't (ignore)."
        for entry, dtype in zip(self.stored, PACKED.values(), strict=True):
            if entry.dtype != dtype:
                return f"'{entry.name}' is stored as {entry.dtype}, not {dtype}: only packed INT4 can be unpacked."
        if len(packed.shape) != 2 or packed.shape[1] * PER_INT32 % group:
            return (
                f"'{packed.name}' has shape {list(packed.shape)}, not [outputs, inputs / {PER_INT32}] of inputs in "
                f"groups of {group}."
            )
        expected = [self.shape[0], self.shape[1] // group]
        if list(scale.shape) != expected:
            return (
                f"'{scale.name}' has shape {list(scale.shape)}, not {expected}, one scale for {group} inputs of "
                f"'{packed.name}'."
            )
        if shape.shape != (2,):
            return f"'{shape.name}' has shape {list(shape.shape)}, not [2]: it must hold outputs and inputs."
        return ""
