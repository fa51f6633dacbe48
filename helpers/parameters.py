"""The parameters of a run: one list of names, types, ranges and defaults for notebooks, YAML and the command line.

The same check runs on every door, so that a misspelt name is never silently ignored: papermill itself only warns.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.errors import InputError, did_you_mean
from helpers.paths import locate, portable, resolve

if TYPE_CHECKING:
    import torch

PRESETS: dict[str, dict[str, Any]] = {
    # The published demo's geometry, on random weights of Kimi K2.6's shapes.
    "demo": {
        "checkpoint": "checkpoints/kimi-k2.6-shaped",
        "layer": 0,
        "input": "random",
        "seq_len": 256,
        "n_sink": 4,
        "n_recent": 32,
        "budget": 64,
        "embedding_std": 1.0,
        "dtype": "bfloat16",
    },
}

# What a capture depends on; the other parameters only choose what is done with it.
CAPTURE_PARAMETERS = (
    "checkpoint", "layer", "input", "text", "seq_len", "continuation", "embedding_std", "seed", "device", "dtype",
)  # fmt: skip


def _field(
    default: Any, help: str, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()
) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


SCORE_NAMES = ("sum", "mean", "calibrated", "window", "last", "decayed")
POLICY_NAMES = (*SCORE_NAMES, "recency", "random", "earliest", "oracle")


@dataclass(frozen=True)
class Parameters:
    """The checked parameters of one run. Build it with :meth:`check`, which gives errors a person can act on."""

    checkpoint: str = _field("checkpoints/kimi-mini", "folder that holds config.json and safetensors files")
    layer: int = _field(0, "which decoder layer's attention to study, from 0", low=0)
    input: str = _field(
        "auto", "what the layer reads; auto: text where there is a tokenizer", choices=("auto", "random", "text")
    )
    text: str = _field("builtin", "a text file, a folder of .txt files, or builtin (text that Python carries)")
    seq_len: int = _field(256, "tokens that are scored and may be evicted", low=1)
    continuation: int = _field(64, "further tokens behind the prompt, in no score", low=0)
    n_sink: int = _field(4, "first tokens, always kept", low=0)
    n_recent: int = _field(32, "last tokens, always kept", low=0)
    budget: int = _field(64, "heavy-hitter slots in the middle", low=0)
    embedding_std: float = _field(1.0, "standard deviation of random embeddings", low=0, high=1e6)
    seed: int = _field(0, "seed of the random embeddings", low=0, high=2**64 - 1)
    score: str = _field("sum", "what notebook 03 ranks tokens by; sum is H2O's", choices=SCORE_NAMES)
    policies: tuple[str, ...] = _field(POLICY_NAMES, "what notebook 04 compares", choices=POLICY_NAMES)
    budgets: tuple[int, ...] = _field((), "slots for notebook 04's curves; empty: 1/32 to 1/2 of the middle", low=0)
    n_texts: int = _field(20, "texts, or draws of random embeddings, that notebook 04 compares over", low=1)
    n_seeds: int = _field(3, "seeds of the random policy and of random weights", low=1, high=1000)
    device: str = _field("auto", "where to compute; auto: the GPU if there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = _field("bfloat16", "precision of weights", choices=("bfloat16", "float16", "float32"))
    run_dir: str = _field("", "run folder; empty: results/<name made from the parameters>")

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> Parameters:
        """Return the parameters that ``values`` (name -> Python value) set, defaults elsewhere.

        Raises:
            InputError: an unknown name (the nearest one is offered), a wrong type, or a value out of range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        checked = {}
        for name, value in values.items():
            if name not in fields:
                raise InputError(
                    f"Unknown parameter '{name}'.{did_you_mean(name, fields)} Parameters: {', '.join(fields)}."
                )
            checked[name] = _check_value(fields[name], value)
        parameters = cls(**checked)
        if parameters.n_sink + parameters.n_recent > parameters.seq_len:
            raise InputError(
                f"n_sink {parameters.n_sink} + n_recent {parameters.n_recent} protect more tokens than seq_len "
                f"{parameters.seq_len} has: lower n_sink or n_recent, or raise seq_len."
            )
        return parameters

    @classmethod
    def parse(cls, assignments: Mapping[str, str]) -> Parameters:
        """Like :meth:`check`, for values that are still text (a command line)."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        return cls.check(
            {name: _parse_value(fields[name], text) if name in fields else text for name, text in assignments.items()}
        )

    @property
    def run_id(self) -> str:
        """A readable name and a short hash of everything but ``run_dir``: the same parameters, the same run."""
        values = dataclasses.asdict(self) | {"checkpoint": self._identity(self.checkpoint)}
        if self.text != "builtin":
            values["text"] = self._identity(self.text)
        del values["run_dir"]
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
        name = locate(self.checkpoint).name
        return f"{name}-layer{self.layer}-{self.input}-{self.seq_len}-budget{self.budget}-{digest}"

    def values(self) -> dict[str, Any]:
        """The parameters as plain values that YAML, JSON and papermill write: lists, no tuples."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def portable(self) -> dict[str, Any]:
        """The parameters as they may stand in a file that is shared: no absolute path."""
        shared = {"checkpoint": portable(locate(self.checkpoint))}
        if self.text != "builtin":
            shared["text"] = portable(locate(self.text))
        if self.run_dir:
            shared["run_dir"] = portable(resolve(self.run_dir))
        return self.values() | shared

    def torch_device(self) -> str:
        """Resolve ``device``: ``auto`` is the GPU where there is one.

        Raises:
            InputError: ``cuda`` where torch sees no GPU.
        """
        import torch  # takes seconds, and a misspelt word must be answered at once

        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise InputError("device=cuda, but torch sees no GPU here: use device=cpu or device=auto.")
        return "cuda" if self.device != "cpu" and available else "cpu"

    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def fingerprint(self) -> str:
        """A digest of the files that the parameters name, cheap: contents of small ones, size and time of the shards.

        Two checkpoints or texts of one name, or one that was changed in its place, have different fingerprints.
        """
        digest = hashlib.sha256()
        folder = locate(self.checkpoint)
        for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.model")]):
            state = path.stat()
            content = path.read_bytes() if state.st_size < 2**24 else f"{state.st_size} {state.st_mtime_ns}".encode()
            digest.update(os.fsencode(path.name) + b"\0" + content)
        text = locate(self.text)
        for path in sorted(text.glob("*.txt")) if text.is_dir() else [text]:
            if self.text != "builtin" and path.is_file():
                digest.update(os.fsencode(path.name) + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def paths(self) -> list[Path]:
        """The files and folders that the parameters name, as absolute paths."""
        read = [self.checkpoint] if self.text == "builtin" else [self.checkpoint, self.text]
        return [locate(path) for path in read] + ([resolve(self.run_dir)] if self.run_dir else [])

    @staticmethod
    def _identity(path: str) -> str:
        """Tell two folders of one name apart, and stay the same when a project inside itself moves."""
        resolved = locate(path)
        inside = portable(resolved)
        return inside if "/" in inside else str(resolved)


def _check_value(field: dataclasses.Field[Any], value: Any) -> Any:
    name, kind, low, choices = field.name, field.type, field.metadata["low"], field.metadata["choices"]
    # bool is an int to Python, never to a person
    right = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max,
        "str": isinstance(value, str),
        "tuple[int, ...]": isinstance(value, list | tuple) and all(type(part) is int for part in value),
        "tuple[str, ...]": isinstance(value, list | tuple) and all(isinstance(part, str) for part in value),
    }[str(kind)]
    if not right:
        raise InputError(f"{name} takes {_KINDS[str(kind)]}, not {value!r}.")
    if isinstance(value, list | tuple):
        return _check_list(field, tuple(value))
    if low is not None and value < low:
        raise InputError(f"{name} must be at least {low}, not {value}.")
    if (high := field.metadata["high"]) is not None and value > high:
        raise InputError(f"{name} must be at most {high}, not {value}.")
    if choices and value not in choices:
        raise InputError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
    if name in ("checkpoint", "text") and not value:
        raise InputError(f"{name} is empty: name a file or folder.")
    return float(value) if kind == "float" else value


def _check_list(field: dataclasses.Field[Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    name, low, choices = field.name, field.metadata["low"], field.metadata["choices"]
    for value in values:
        if low is not None and value < low:
            raise InputError(f"{name} must be at least {low}, not {value}.")
        if choices and value not in choices:
            raise InputError(f"{name} takes some of {', '.join(choices)}, not {value!r}.{did_you_mean(value, choices)}")
    if len(set(values)) < len(values):
        raise InputError(f"{name} names {max(values, key=values.count)!r} twice.")
    if choices and not values:
        raise InputError(f"{name} is empty: it takes some of {', '.join(choices)}.")
    return tuple(sorted(values, key=choices.index if choices else None))


def _parse_value(field: dataclasses.Field[Any], text: str) -> Any:
    if field.type == "str":
        return text
    if str(field.type).startswith("tuple"):
        parts = [part.strip() for part in text.strip("[]() ").split(",") if part.strip()]
        try:
            return [int(part) for part in parts] if "int" in str(field.type) else [part.strip("'\"") for part in parts]
        except ValueError:
            raise InputError(f"{field.name} takes {_KINDS[str(field.type)]}, not {text!r}.") from None
    try:
        return int(text) if field.type == "int" else float(text)
    except ValueError:
        raise InputError(f"{field.name} takes {_KINDS[str(field.type)]}, not {text!r}.") from None


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "tuple[int, ...]": "a list of whole numbers",
    "tuple[str, ...]": "a list of words",
}


def check_parameters(namespace: Mapping[str, Any]) -> Parameters:
    """Check a notebook's parameters; ``namespace`` is the notebook's ``globals()``.

    Reads the parameters' values, and refuses a variable that looks like a misspelt one: papermill injects an
    unknown name beside the defaults, where it would be ignored.
    """
    fields = [field.name for field in dataclasses.fields(Parameters)]
    injected = names_injected_by_papermill(namespace.get("In", ()))
    for name in sorted(injected - set(fields)):
        raise InputError(f"Unknown parameter '{name}'.{did_you_mean(name, fields)} Parameters: {', '.join(fields)}.")
    for name, value in namespace.items():
        literal = isinstance(value, (bool, int, float, str, list, tuple)) and not name.startswith("_")
        if literal and name not in fields and difflib.get_close_matches(name, fields, cutoff=0.8):
            raise InputError(f"'{name}' is not a parameter.{did_you_mean(name, fields)}")
    return Parameters.check({name: namespace[name] for name in fields if name in namespace})


def names_injected_by_papermill(cells: Any) -> set[str]:
    """Names that papermill's cell of a notebook's ``In`` sets: what the caller asked for, known or not."""
    names: set[str] = set()
    for source in cells:
        if source.startswith("# Parameters\n"):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names
