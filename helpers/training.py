"""Training the miniature Kimi on text that Python carries: seeded, and resumed wherever it was interrupted.

Every step's batch follows from the seed and the step's number alone. First come short sequences, most of them one
passage over and over, in which looking back pays; then text; then long text with the experts rounded to INT4 in the
forward pass, as the K2 family was trained; and at last sequences of which most repeat a passage again.
"""

from __future__ import annotations

import csv
import hashlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from tqdm import tqdm
from transformers import AttentionInterface

from helpers.corpus import Document, documents
from helpers.errors import InputError
from helpers.files import atomic_path
from helpers.miniature import EOS, new_model
from helpers.quantization import dequantize_int4, quantize_int4
from helpers.tokenizer import Tokenizer

BIAS_STEP = 1e-3  # of a router's correction bias (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
MUON_RATE, ADAM_RATE = 5e-3, 1e-3
WARM_UP, LAST_RATE = 30, 0.05  # steps; of the highest rate
PASSAGE_TWICE, PASSAGE_OVER_AND_OVER = (8, 160), (12, 48)  # tokens, of what a sequence repeats
STATE, LOSSES = "state.safetensors", "training.csv"
COLUMNS = ("step", "stage", "tokens", "loss", "held_out_loss", "copied_loss")
KEPT = ("momentum_buffer", "step", "exp_avg", "exp_avg_sq")  # of the optimisers, for each parameter
IMPLEMENTATION = "padded"


@dataclass(frozen=True)
class Stage:
    """A part of the training: ``steps`` steps of ``batch`` sequences of ``length`` tokens."""

    name: str
    steps: int
    batch: int
    length: int
    repeating: float  # share of the sequences in which a passage stands twice, or over and over
    random: float  # share of these passages whose tokens are drawn from the text one by one
    over_and_over: bool = False  # these sequences hold nothing but their passage
    rates: tuple[float, float] = (1, 1)  # learning rate over the highest, at the beginning and towards the end
    quantized: bool = False  # the routed experts' weights are rounded to INT4 in the forward pass


STAGES = (
    Stage("copying", 1500, 16, 128, repeating=0.9, random=0.5, over_and_over=True),
    Stage("text", 600, 16, 512, repeating=0.15, random=0.1),
    Stage("long", 50, 8, 1024, repeating=0.15, random=0.1, quantized=True, rates=(1, 6 / 7)),
    Stage("long, repeating", 300, 8, 1024, repeating=0.4, random=0.2, quantized=True, rates=(6 / 7, 0)),
    Stage("copying again", 450, 12, 320, repeating=0.9, random=0.3, quantized=True, rates=(0.5, 0)),
)


# a few steps, to see that everything works
TRIAL = (
    Stage("copying", 2, 4, 128, repeating=0.9, random=0.5, over_and_over=True),
    Stage("text", 2, 2, 256, repeating=0.15, random=0.1),
    Stage("long", 2, 1, 512, repeating=0.15, random=0.1, quantized=True),
)
PLANS = {"full": STAGES, "trial": TRIAL}


@dataclass(frozen=True)
class TokenizedCorpus:
    """Token ids of the training documents, one behind the other, and of the held-out ones, each its own."""

    stream: torch.Tensor  # [n], an EOS behind each document
    starts: torch.Tensor  # where documents begin in it
    held_out: list[torch.Tensor]

    @property
    def identity(self) -> str:
        """What tells one corpus from another: two Pythons' differ."""
        return hashlib.sha256(self.stream.numpy().tobytes()).hexdigest()


def tokenize_corpus(tokenizer: Tokenizer, corpus: list[Document] | None = None) -> TokenizedCorpus:
    """Tokenise the running Python's documents, or ``corpus``."""
    stream: list[int] = []
    starts, held_out = [], []
    for document in documents() if corpus is None else corpus:
        ids = tokenizer.encode(document.text).ids
        if document.held_out:
            held_out.append(torch.tensor(ids))
        else:
            starts.append(len(stream))
            stream += [*ids, EOS]
    return TokenizedCorpus(torch.tensor(stream), torch.tensor(starts), held_out)


def batch_of(stage: Stage, corpus: TokenizedCorpus, seed: int) -> torch.Tensor:
    """Cut ``stage.batch`` sequences [batch, length + 1] out of the training text, one in five where a document begins.

    In a share of them, a passage (of the text, or of tokens drawn from it one by one) is written to two places, or over
    and over.
    """
    generator = torch.Generator().manual_seed(seed)
    size = stage.length + 1

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def window(n: int) -> torch.Tensor:
        last = len(corpus.stream) - n
        first = between(0, last)
        if between(1, 5) == 1:
            first = min(int(corpus.starts[between(0, len(corpus.starts) - 1)]), last)
        return corpus.stream[first : first + n]

    rows = []
    for _ in range(stage.batch):
        row = window(size).clone()
        if torch.rand((), generator=generator) < stage.repeating:
            shortest, longest = PASSAGE_OVER_AND_OVER if stage.over_and_over else PASSAGE_TWICE
            n = between(shortest, min(size // 2 - 2, longest))
            passage = window(n)
            if torch.rand((), generator=generator) < stage.random:
                passage = corpus.stream[torch.randint(0, len(corpus.stream), (n,), generator=generator)]
            if stage.over_and_over:
                row = passage.repeat(size // n + 1)[:size]
            else:
                first = between(0, size - 2 * n)
                second = between(first + n, size - n)
                row[first : first + n] = row[second : second + n] = passage
        rows.append(row)
    return torch.stack(rows)


def rate_factor(step: int, stages: tuple[Stage, ...] = STAGES) -> float:
    """A step's learning rate over the highest: up in the first ones, then in each stage along a straight line."""
    number = sum(end <= step for end in _ends(stages))
    stage, begun = stages[number], _ends(stages)[number] - stages[number].steps
    first, last = stage.rates
    return min(1.0, (step + 1) / WARM_UP) * max(LAST_RATE, first + (last - first) * (step - begun) / stage.steps)


@dataclass
class Trainer:
    """One training, new or taken up where ``folder`` left it.

    ``folder`` keeps ``state.safetensors`` (weights, the optimiser's moments, the step) and ``training.csv`` (losses).

    Raises:
        InputError: ``folder`` holds the state of another seed, other stages or other text.
    """

    folder: Path
    corpus: TokenizedCorpus
    seed: int = 0
    stages: tuple[Stage, ...] = STAGES
    device: str = "cpu"
    save_every: int = 50

    def __post_init__(self) -> None:
        self.step = 0
        model: Any = new_model(self.seed)
        self.model = model.to(self.device)
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.model.set_experts_implementation("grouped_mm")
        self.loads: dict[nn.Module, torch.Tensor] = {}  # router -> tokens that each of its experts got
        for layer in self.model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._count)
        self.optimizers = _optimizers(self.model)
        # names and tensors before any parametrization renames them
        self.parameters = dict(self.model.named_parameters())
        self.biases = {n: b for n, b in self.model.named_buffers() if n.endswith("e_score_correction_bias")}
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / STATE).exists():
            self._resume()
        else:
            (self.folder / LOSSES).unlink(missing_ok=True)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and correction biases by name, float32, as they are: nothing is rounded."""
        return {name: parameter.data for name, parameter in self.parameters.items()} | self.biases

    def unrounded_model(self) -> Any:
        """The model as it is trained, but computing with the weights that the quantiser would round."""
        model: Any = new_model(self.seed)
        model.load_state_dict(self.weights)
        return model.to(self.device).eval()

    def train(self) -> None:
        """Train to the end of the last stage, with a bar; saves every ``save_every`` steps and at the end."""
        total = sum(stage.steps for stage in self.stages)
        with tqdm(total=total, initial=self.step, desc="Training", unit="step") as bar:
            for stage, end in zip(self.stages, _ends(self.stages), strict=True):
                while self.step < end:
                    started = time.perf_counter()
                    loss = self._one_step(stage)
                    rate = stage.batch * stage.length / (time.perf_counter() - started)
                    measured: list[float] = []
                    if self.step % self.save_every == 0 or self.step == total:
                        measured = list(self.evaluate())
                    self._note([self.step, stage.name, stage.batch * stage.length, loss, *measured])
                    if measured:
                        self._save()
                    bar.set_postfix_str(f"{stage.name}, loss {loss:.2f}, {rate:,.0f} tokens/s")
                    bar.update()

    def _one_step(self, stage: Stage) -> float:
        if stage.quantized:
            self._quantize_experts()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * rate_factor(self.step, self.stages)
        tokens = batch_of(stage, self.corpus, self.seed * 1_000_003 + self.step).to(self.device)
        self.model.train()
        with self._bfloat16():
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        for router, load in self.loads.items():  # the idle experts' bias rises, so that they get more tokens
            router.e_score_correction_bias += BIAS_STEP * torch.sign(load.mean() - load)  # type: ignore[operator]
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss in nats a token on held-out text, and on 64 held-out tokens that stand there a second time."""
        self.model.eval()
        ordinary = [ids[:513] for ids in self.corpus.held_out if len(ids) >= 1025][:8]
        passages = torch.stack([ids[100:164] for ids in self.corpus.held_out if len(ids) >= 1025][:32])
        return (
            self._loss(torch.stack(ordinary), first=0),
            self._loss(torch.cat([passages, passages], dim=1), first=passages.shape[1]),
        )

    def _loss(self, tokens: torch.Tensor, first: int) -> float:
        tokens = tokens.to(self.device)
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits[:, first:]
        return float(functional.cross_entropy(logits.flatten(0, 1), tokens[:, first + 1 :].flatten()))

    def _bfloat16(self) -> AbstractContextManager[Any]:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def _count(self, router: nn.Module, _: Any, output: Any) -> None:
        if router.training:
            experts = router.e_score_correction_bias
            self.loads[router] = torch.bincount(output[2].flatten(), minlength=len(experts)).float()  # type: ignore[arg-type]

    def _quantize_experts(self) -> None:
        """From here on, routed experts compute with INT4's numbers (quantisation-aware training)."""
        for layer in self.model.model.layers:
            experts = getattr(layer.mlp, "experts", None)
            if experts is not None and not parametrize.is_parametrized(experts):
                for name in ("gate_up_proj", "down_proj"):
                    parametrize.register_parametrization(experts, name, _Int4())

    def _optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        muon, adam = self.optimizers
        return muon if any(parameter is own for own in muon.param_groups[0]["params"]) else adam

    def _identity(self) -> dict[str, str]:
        return {"seed": str(self.seed), "stages": repr(self.stages), "text": self.corpus.identity}

    def _note(self, values: list[Any]) -> None:
        path = self.folder / LOSSES
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow([f"{value:.4f}" if isinstance(value, float) else value for value in values])

    def _save(self) -> None:
        tensors = dict(self.weights)
        for name, parameter in self.parameters.items():
            state = self._optimizer_of(parameter).state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in KEPT if key in state}
        with atomic_path(self.folder / STATE) as partial:
            metadata = {"step": str(self.step)} | self._identity()
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata=metadata)

    def _resume(self) -> None:
        with safe_open(self.folder / STATE, framework="pt", device=self.device) as file:
            metadata = file.metadata()
            for key, own in self._identity().items():
                if metadata.get(key) != own:
                    raise InputError(
                        f"{self.folder.name} holds a training with other {key}: name another folder, or remove "
                        f"{STATE} there to begin anew."
                    )
            self.step, stored = int(metadata["step"]), set(file.keys())
            for name, parameter in self.parameters.items():
                parameter.data.copy_(file.get_tensor(name))
                self._optimizer_of(parameter).state[parameter] = {
                    key: file.get_tensor(f"{key}.{name}") for key in KEPT if f"{key}.{name}" in stored
                }
            for name, bias in self.biases.items():
                bias.copy_(file.get_tensor(name))
        lines = (self.folder / LOSSES).read_text(encoding="utf-8").splitlines(keepends=True)
        with atomic_path(self.folder / LOSSES) as partial:  # what was trained after the last save is trained again
            partial.write_text("".join(lines[: 1 + self.step]), encoding="utf-8")


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the hidden layers' matrices, as Kimi K2 was trained, AdamW for all else: embeddings, head, experts.

    Muon (arXiv:2502.16982) orthogonalises each matrix's step; torch's takes single matrices, no stack of experts.
    """
    named = dict(model.named_parameters())
    hidden = {name: weight for name, weight in named.items() if weight.ndim == 2 and name.startswith("model.layers.")}
    other = [weight for name, weight in named.items() if weight.ndim > 1 and name not in hidden]
    vectors = [weight for weight in named.values() if weight.ndim == 1]
    muon = torch.optim.Muon(hidden.values(), lr=MUON_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": other, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [muon, torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.95), fused=True)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["highest"] = group["lr"]
    return optimizers


class _Int4(nn.Module):
    """Rounds a weight to packed INT4's numbers, and lets gradients through as if it hadn't (arXiv:1308.3432)."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (dequantize_int4(*quantize_int4(weight)) - weight).detach()


def _ends(stages: tuple[Stage, ...]) -> list[int]:
    return [sum(stage.steps for stage in stages[: i + 1]) for i in range(len(stages))]


def _padded(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Torch's fused attention with values padded to the keys' width: where widths differ, it builds whole matrices."""
    width = value.shape[-1]
    value = functional.pad(value, (0, query.shape[-1] - width))
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output[..., :width].transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _padded)
