"""The miniature Kimi that ships with the project: how it was made, and how good it is."""

from __future__ import annotations

import csv
import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from helpers.checkpoint import Checkpoint
from helpers.corpus import Document, documents
from helpers.errors import InputError, did_you_mean
from helpers.files import atomic_folder
from helpers.miniature import train_tokenizer, write_tokenizer, write_weights
from helpers.model import load_model
from helpers.parameters import Parameters, names_injected_by_papermill
from helpers.quality import (
    context_losses,
    copying_losses,
    heavy_sets,
    held_out_losses,
    held_out_windows,
    seen_before,
    token_losses,
)
from helpers.tokenizer import Tokenizer, load_tokenizer
from helpers.training import LOSSES, PLANS, Trainer, tokenize_corpus

CARD, DATA, TRAINING = "README.md", "data.csv", "training.json"
ORIGIN_NOTE = (
    "a miniature of Kimi K2.6's architecture with {parameters:.1f} million parameters, trained by this project on "
    "Python's own sources and documentation"
)


def train_kimi_mini(folder: Path, state: Path, seed: int = 0, device: str = "cpu", plan: str = "full") -> None:
    """Train the miniature and write it to ``folder``; an interrupted training is taken up from ``state``.

    An earlier ``folder`` is replaced at the end, but for its model card.

    Args:
        folder: what is written.
        state: keeps an unfinished training (160 MB).
        seed: of the first weights and of every batch.
        device: such as ``cpu`` or ``cuda``.
        plan: of :data:`~helpers.training.PLANS`; ``trial`` is a few steps, to see that everything works.

    Raises:
        InputError: no such plan, ``state`` is another training's, or ``folder`` holds something else.
    """
    if plan not in PLANS:
        raise InputError(f"There is no plan '{plan}' of a training: plans are {', '.join(PLANS)}.")
    if folder.exists() and not (folder / TRAINING).exists() and any(folder.iterdir()):
        raise InputError(f"The folder {folder.name} holds something else than a miniature: name another one.")
    corpus = documents()
    state.mkdir(parents=True, exist_ok=True)
    write_tokenizer(train_tokenizer(document.text for document in corpus if not document.held_out), state)
    tokenizer = load_tokenizer(state)
    tokens = tokenize_corpus(tokenizer, corpus)
    trainer = Trainer(state, tokens, seed, PLANS[plan], device)
    trainer.train()
    write_kimi_mini(folder, trainer, corpus, tokenizer)


def write_kimi_mini(folder: Path, trainer: Trainer, corpus: list[Document], tokenizer: Tokenizer) -> None:
    """Write what ``trainer`` has trained, with the tokenizer of its folder, the data list and the losses."""
    weights = trainer.weights
    millions = sum(weight.numel() for name, weight in weights.items() if "bias" not in name) / 1e6
    with atomic_folder(folder) as partial:
        shutil.copyfile(trainer.folder / "tiktoken.model", partial / "tiktoken.model")
        shutil.copyfile(trainer.folder / LOSSES, partial / LOSSES)
        write_weights(weights, ORIGIN_NOTE.format(parameters=millions), partial)
        _write_data(partial / DATA, corpus, tokenizer)
        record = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": trainer.seed,
            "stages": [stage.__dict__ for stage in trainer.stages],
            "tokens": sum(stage.steps * stage.batch * stage.length for stage in trainer.stages),
            "held_out_loss_before_packing": loss_before_packing(trainer),
        }
        (partial / TRAINING).write_text(json.dumps(record, indent=2) + "\n")
        if (folder / CARD).exists():
            shutil.copyfile(folder / CARD, partial / CARD)


def loss_before_packing(trainer: Trainer) -> float:
    """Held-out loss as :func:`~helpers.quality.held_out_losses` has it, of the float32 weights that get packed."""
    model = trainer.unrounded_model()
    return float(token_losses(model, held_out_windows(trainer.corpus))[:, 1:].mean())


def _write_data(path: Path, corpus: list[Document], tokenizer: Tokenizer) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "split", "characters", "tokens", "sha256"))
        for document in corpus:
            split = "held-out" if document.held_out else "training"
            n_tokens = len(tokenizer.encode(document.text).ids)
            writer.writerow((document.name, split, len(document.text), n_tokens, document.sha256))


@dataclass(frozen=True)
class Quality:
    """What is measured of a miniature's stored files, on held-out text; losses in nats a token."""

    n_documents: int
    n_tokens: int  # that are predicted
    held_out: dict[str, float]  # model, trigram, unigram
    context: dict[str, float]  # everything, last_32
    copying: dict[str, float]  # first, second
    before_packing: float
    seen_before: float  # share of the held-out windows of 32 tokens that stand in the training text
    layers: pd.DataFrame  # one row a layer: overlap_with_null, chance, …

    @property
    def below_unigram(self) -> float:
        """Share of the unigram model's loss that the model saves."""
        return 1 - self.held_out["model"] / self.held_out["unigram"]

    @property
    def context_gain(self) -> float:
        return self.context["last_32"] - self.context["everything"]

    @property
    def saved_by_copying(self) -> float:
        return 1 - self.copying["second"] / self.copying["first"]

    @property
    def packing_cost(self) -> float:
        return self.held_out["model"] - self.before_packing

    @property
    def layers_unlike_null(self) -> int:
        return int((self.layers["overlap_with_null"] < 0.5).sum())

    def table(self) -> pd.DataFrame:
        """Every figure under its name, as the model card and the notebook show it."""
        held_out, copying = self.held_out, self.copying
        rows = [
            ("held-out loss", f"{held_out['model']:.3f} nats"),
            ("… of an interpolated trigram model", f"{held_out['trigram']:.3f} nats"),
            ("… of a unigram model", f"{held_out['unigram']:.3f} nats"),
            ("below the unigram model", f"{self.below_unigram:.1%}"),
            ("loss at tokens 700–999, everything before them", f"{self.context['everything']:.3f} nats"),
            ("… the last 32 tokens alone", f"{self.context['last_32']:.3f} nats"),
            ("gained by context", f"{self.context_gain:.3f} nats"),
            ("loss on 64 tokens the first time", f"{copying['first']:.3f} nats"),
            ("… the second time", f"{copying['second']:.3f} nats"),
            ("saved by copying", f"{self.saved_by_copying:.1%}"),
            ("held-out loss before packing (float32)", f"{self.before_packing:.3f} nats"),
            ("cost of BF16 and packed INT4", f"{self.packing_cost:+.3f} nats"),
            ("layers whose heavy set overlaps the null's by less than half", f"{self.layers_unlike_null} of "
             f"{len(self.layers)}"),
        ]  # fmt: skip
        overlaps = self.layers["overlap_with_null"]
        rows.append(("held-out windows of 32 tokens that training text has, too", f"{self.seen_before:.1%}"))
        rows += [(f"layer {i}: overlap with the null", f"{overlap:.2f}") for i, overlap in overlaps.items()]
        return pd.DataFrame(rows, columns=["figure", "measured"])

    def text(self) -> str:
        """The table as lines of text, as the model card holds them."""
        lines = [f"| {figure} | {measured} |" for figure, measured in self.table().itertuples(index=False)]
        return "\n".join(["| figure | measured |", "|---|---|", *lines])


def measure_kimi_mini(folder: Path, device: str = "cpu") -> Quality:
    """Measure a miniature from its stored files, on the running Python's held-out documents (minutes on two cores).

    Raises:
        InputError: the folder is no miniature's, or the files don't fit.
    """
    before_packing = float(training_record(folder)["held_out_loss_before_packing"])
    corpus = tokenize_corpus(load_tokenizer(folder))
    model = load_model(Checkpoint.open(folder), device=device)
    windows = held_out_windows(corpus)
    return Quality(
        n_documents=len(windows),
        n_tokens=windows[:, 2:].numel(),
        held_out=held_out_losses(model, corpus),
        context=context_losses(model, corpus),
        copying=copying_losses(model, corpus),
        before_packing=before_packing,
        seen_before=seen_before(corpus),
        layers=heavy_sets(model, corpus),
    )


def training_record(folder: Path) -> dict[str, Any]:
    """Versions, seed, stages and tokens of a miniature's training.

    Raises:
        InputError: the folder is no miniature's.
    """
    if not (folder / TRAINING).exists():
        raise InputError(
            f"{folder.name} has no {TRAINING}: name a folder that `python -m helpers train-kimi-mini` wrote."
        )
    record: dict[str, Any] = json.loads((folder / TRAINING).read_text())
    return record


def training_losses(folder: Path) -> pd.DataFrame:
    """One row a step: ``step, stage, tokens, loss`` and, where they were measured, ``held_out_loss, copied_loss``."""
    return pd.read_csv(folder / LOSSES)


@dataclass(frozen=True)
class DataList:
    """What a miniature was trained on and what was held out, and how much of it the running Python has."""

    by_split: pd.DataFrame
    held_out: pd.DataFrame
    sentence: str


def data_list(folder: Path) -> DataList:
    """Read a miniature's list of documents, and compare its digests with the running Python's."""
    data = pd.read_csv(folder / DATA, keep_default_na=False)
    by_split = data.groupby("split", sort=False).agg(
        documents=("name", "size"), characters=("characters", "sum"), tokens=("tokens", "sum")
    )
    here = {document.name: document.sha256 for document in documents()}
    same = sum(here.get(name) == digest for name, digest in zip(data["name"], data["sha256"], strict=True))
    sentence = (
        f"Python {platform.python_version()} here has {same:,} of these {len(data):,} documents exactly, and "
        f"{len(here.keys() - set(data['name'])):,} others."
    )
    held_out = data[data["split"] == "held-out"].sort_values("tokens", ascending=False)
    return DataList(by_split.reset_index(), held_out[["name", "characters", "tokens"]], sentence)


TRAINING_PARAMETERS = {
    "checkpoint": str, "train": bool, "state": str, "plan": str, "seed": int, "device": str,
}  # fmt: skip


def check_training_parameters(values: Mapping[str, Any]) -> str:
    """Check the parameters of notebook 00, given its variables; returns the device to compute on.

    Raises:
        InputError: an unknown name from papermill, a parameter of another type, or beyond what there is.
    """
    for name in sorted(names_injected_by_papermill(values.get("In", ())) - set(TRAINING_PARAMETERS)):
        raise InputError(
            f"Unknown parameter '{name}'.{did_you_mean(name, TRAINING_PARAMETERS)} Parameters: "
            f"{', '.join(TRAINING_PARAMETERS)}."
        )
    for name, kind in TRAINING_PARAMETERS.items():
        if type(values[name]) is not kind:
            raise InputError(f"{name} takes a {kind.__name__}, not {values[name]!r}.")
    return Parameters.check({"seed": values["seed"], "device": values["device"]}).torch_device()
