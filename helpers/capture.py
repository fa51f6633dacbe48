"""One pass over a layer's attention: its output, and how much attention each token collects.

Layers run as transformers wrote them; only the softmax part is ours, registered as the attention implementation
``column_sums``. It never holds the L x L matrix (:mod:`helpers.column_sums`; on a GPU, :mod:`helpers.fused`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface

from helpers.column_sums import attention_and_column_sums, multiplies_in
from helpers.errors import InputError
from helpers.layer import AttentionLayer, attention_window
from helpers.memory import STATISTICS, check_capture_fits, heads_at_once
from helpers.products import ONE_AT_A_TIME, Float32Products

WINDOW = 32  # queries of ``mass_window`` (SnapKV's observation window)
DECAY = 0.98  # forgetting factor of ``mass_decayed`` (as in A2SF)
IMPLEMENTATION = "column_sums"
PROGRESS_AFTER_S = 2.0


class ColumnSums:
    """How much attention each prompt token of one layer collects, over one forward pass or several on one cache.

    Each statistic is a weighted sum over queries i of the softmax probability p(i -> j) that query i gives to prompt
    token j, float32, [B, H, P] for B samples, H query heads and P prompt tokens. Queries that are padding count for
    nothing.

    - ``mass``: all prompt queries (i < P): the attention mass that H2O accumulates (arXiv:2306.14048);
    - ``mass_windows[w]``: the last w prompt queries (SnapKV, arXiv:2404.14469); ``mass_window`` is that of the first w;
    - ``mass_last``: the last prompt query (TOVA, arXiv:2401.06104);
    - ``mass_decayed``: prompt queries weighted by ``decay ** (P - 1 - i)`` (A2SF, arXiv:2407.20485);
    - ``mass_continuation``: the queries after the prompt (i >= P), which no score may see.
    """

    def __init__(
        self,
        prompt_length: int | None = None,
        windows: tuple[int, ...] = (WINDOW,),
        decay: float = DECAY,
    ) -> None:
        """Collect for a prompt of ``prompt_length`` tokens; None: all tokens of the first forward pass.

        Raises:
            InputError: an empty prompt, a window of no query, or a decay outside (0, 1].
        """
        if prompt_length is not None and (type(prompt_length) is not int or prompt_length < 1):
            raise InputError(f"A prompt takes a whole number of tokens, at least 1, not {prompt_length!r}.")
        if not isinstance(windows, tuple | list) or not windows or any(type(w) is not int or w < 1 for w in windows):
            raise InputError(f"windows are whole numbers of queries, at least 1, such as (16, 32), not {windows!r}.")
        if not 0 < decay <= 1:
            raise InputError(f"decay is above 0 and at most 1, not {decay:g}.")
        self.prompt_length = prompt_length
        self.windows = tuple(windows)
        self.decay = decay
        self._sums: torch.Tensor | None = None
        self.n_read = 0  # tokens, padding included
        self.progress: Callable[[int], object] | None = None

    @property
    def sums(self) -> torch.Tensor:
        """All statistics [S, B, H, P]: mass, one a window, the last query's, decayed, the continuation's."""
        if self._sums is None:
            raise InputError("Nothing has been recorded: run the model first.")
        return self._sums

    @property
    def mass(self) -> torch.Tensor:
        return self.sums[0]

    @property
    def mass_windows(self) -> dict[int, torch.Tensor]:
        return dict(zip(self.windows, self.sums[1:], strict=False))

    @property
    def mass_window(self) -> torch.Tensor:
        return self.sums[1]

    @property
    def mass_last(self) -> torch.Tensor:
        return self.sums[-3]

    @property
    def mass_decayed(self) -> torch.Tensor:
        return self.sums[-2]

    @property
    def mass_continuation(self) -> torch.Tensor:
        return self.sums[-1]

    def first_sample(self) -> dict[str, torch.Tensor]:
        """The statistics of the batch's first sample by name, each [H, P] on the CPU, as they are stored."""
        more = {f"mass_window_{w}": mass for w, mass in list(self.mass_windows.items())[1:]}
        named = {
            "mass": self.mass, "mass_window": self.mass_window, "mass_last": self.mass_last,
            "mass_decayed": self.mass_decayed, "mass_continuation": self.mass_continuation, **more,
        }  # fmt: skip
        return {name: mass[0].contiguous().cpu() for name, mass in named.items()}

    def start(self, batch: int, heads: int, n_queries: int, n_keys: int, device: torch.device) -> None:
        """Take up a forward pass of ``n_queries`` at the end of ``n_keys``: new, or further on a cache."""
        if n_queries == n_keys:
            prompt = self.prompt_length or n_keys
            for w in self.windows:
                if w > prompt and self.windows != (WINDOW,):
                    warnings.warn(
                        f"A window of {w} queries is longer than the prompt of {prompt}: all its queries are taken.",
                        stacklevel=2,
                    )
            self._sums = torch.zeros(STATISTICS + len(self.windows), batch, heads, prompt, device=device)
        elif self._sums is None or self._sums.shape[1:3] != (batch, heads):
            recorded = "none" if self._sums is None else "{} of {}".format(*self._sums.shape[1:3])
            raise InputError(
                f"A cache of {n_keys - n_queries} tokens goes on with {batch} samples of {heads} heads, and recorded "
                f"are {recorded}: start recording before the first token, and keep the batch."
            )
        self.n_read = n_keys

    def query_weights(self, n_queries: int, n_keys: int, real: torch.Tensor | None) -> torch.Tensor:
        """Weights [statistics, B or 1, N] that turn the probabilities of the last N queries into the statistics.

        ``real`` [B, n_keys] is False where a token is padding.
        """
        first, prompt = n_keys - n_queries, self.sums.shape[-1]
        position = torch.arange(first, n_keys, device=self.sums.device)[None]
        age = prompt - 1 - position  # prompt queries that come after this one
        of_prompt, later = position < prompt, position >= prompt
        if real is not None:
            in_parts = n_keys < prompt or 0 < first < prompt
            if in_parts and not real[:, min(n_keys, prompt) - 1].all():
                raise InputError("A prompt that comes in parts can be padded on the left only.")
            if n_keys >= prompt:
                in_prompt = real[:, :prompt].long()
                after = in_prompt.sum(dim=1, keepdim=True) - in_prompt.cumsum(dim=1)
                age = nn.functional.pad(after, (0, n_keys - prompt))[:, first:]
            of_prompt, later = of_prompt & real[:, first:], later & real[:, first:]
        decayed = torch.pow(self.decay, age.clamp(min=0).double()).float()
        decayed[decayed < torch.finfo(torch.float32).tiny] = 0.0
        windows = [of_prompt & (age < w) for w in self.windows]
        return torch.stack(
            [x.float() for x in (of_prompt, *windows, of_prompt & (age == 0), of_prompt * decayed, later)]
        )


class Capture(ColumnSums):
    """The column sums of one attention layer alone, and its ``output`` [B, L, hidden] in the layer's dtype."""

    output: torch.Tensor


def capture_attention(
    layer: AttentionLayer,
    hidden_states: torch.Tensor,
    prompt_length: int | None = None,
    *,
    windows: tuple[int, ...] = (WINDOW,),
    decay: float = DECAY,
) -> Capture:
    """Run ``layer`` over ``hidden_states`` [B, L, hidden] and return its :class:`Capture`.

    The first ``prompt_length`` tokens (default: all) are the prompt. Samples of a batch never mix. Hidden states are
    taken to the layer's device and dtype. A window longer than the prompt takes all of it. Captures of several threads
    wait for each other.

    Raises:
        InputError: hidden states of another width or with NaN or infinity, a prompt longer than the input or empty, an
            attention that isn't plain causal softmax over this length, or a length that memory doesn't hold.
    """
    check_hidden_states(layer, hidden_states)
    n_tokens = hidden_states.shape[1]
    if prompt_length is not None and not 1 <= prompt_length <= n_tokens:
        raise InputError(f"A prompt of {prompt_length} tokens doesn't fit an input of {n_tokens}.")
    if layer.module in _RECORDING:
        raise InputError(f"Layer {layer.index} is being recorded already: capture it outside record_attention().")
    captured = Capture(n_tokens if prompt_length is None else prompt_length, windows, decay)
    check_capture_fits(
        layer.module, layer.n_heads, len(hidden_states), n_tokens, layer.dtype, layer.device, n_windows=len(windows)
    )
    hidden_states = hidden_states.to(device=layer.device, dtype=layer.dtype)
    with (
        ONE_AT_A_TIME,
        torch.no_grad(),
        Float32Products(),
        attention_implementation(layer.module),
        _progress(captured, len(hidden_states), layer.n_heads, n_tokens),
    ):
        captured.output = _forward(layer, hidden_states, captured)
    if not torch.isfinite(captured.mass).all():  # finite inputs: a product has left the range of its type
        raise InputError(
            f"Attention of layer {layer.index} is not finite: its logits are too large for "
            f"{str(layer.dtype).removeprefix('torch.')}. Use dtype=bfloat16 or float32, or smaller "
            "inputs (embedding_std)."
        )
    return captured


def prompt_statistics(
    layer: AttentionLayer, hidden_states: torch.Tensor, prompt_length: int
) -> dict[str, torch.Tensor]:
    """Capture what a run stores of ``hidden_states`` [1, L, hidden]: the statistics by name, each [H, prompt_length].

    ``mass_window`` is of the last ``WINDOW`` queries, or of all where the prompt has fewer.
    """
    return capture_attention(layer, hidden_states, prompt_length, windows=(min(WINDOW, prompt_length),)).first_sample()


@contextmanager
def record_attention(
    model: Any, prompt_length: int | None = None, *, windows: tuple[int, ...] = (WINDOW,), decay: float = DECAY
) -> Iterator[Mapping[int, ColumnSums]]:
    """Record the column sums of every attention layer while a whole transformers model runs, however it is called.

    Yields layer number -> :class:`ColumnSums`, filled by the forward passes inside the ``with`` block: any batch,
    padded or not, with or without a growing cache. A call without earlier keys starts anew. By default the first call
    is the prompt, and what follows on its cache (chunks, decoding) is its continuation; ``prompt_length`` counts the
    prompt's columns, padding included, when it comes in parts. Of a multimodal model, the text decoder is recorded.

    Not for assisted decoding, whose rejected drafts would count as continuation, nor for beam search; and one thread at
    a time.

    Raises:
        InputError: a model without causal self-attention layers, or whose attention can't be replaced, or is being
            recorded already; at the end, a mass that isn't finite.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = getattr(decoder, "layers", ())
    modules = {i: part.self_attn for i, part in enumerate(layers) if hasattr(part, "self_attn")}
    if not modules or not all(getattr(module, "is_causal", False) for module in modules.values()):
        raise InputError(f"{type(model).__name__} is no stack of causal self-attention layers: nothing to record.")
    if any(module in _RECORDING for module in modules.values()):
        raise InputError(f"{type(model).__name__} is being recorded already.")
    recorded = {i: ColumnSums(prompt_length, windows, decay) for i in modules}
    before = decoder.config._attn_implementation
    try:
        try:
            decoder.set_attn_implementation(IMPLEMENTATION)  # of a vision tower beside it, nothing is changed
        except ValueError as error:
            raise InputError(f"{type(model).__name__} doesn't let its attention be replaced: {error}") from error
        _RECORDING.update({module: recorded[i] for i, module in modules.items()})
        yield recorded
    finally:
        for module in modules.values():
            _RECORDING.pop(module, None)
        decoder.set_attn_implementation(before)
    _check_recorded(recorded)


def _check_recorded(recorded: Mapping[int, ColumnSums]) -> None:
    for i, record in recorded.items():
        if record.n_read and not torch.isfinite(record.sums).all():
            raise InputError(f"Attention of layer {i} is not finite: its logits are too large for the model's dtype.")
    record = recorded[min(recorded)]
    if record.n_read and record.prompt_length is not None and record.n_read < record.prompt_length:
        warnings.warn(
            f"Only {record.n_read} of the prompt's {record.prompt_length} tokens were read: what is counted from its "
            "end (mass_windows, mass_last, mass_decayed) is of no use.",
            stacklevel=4,
        )


def check_hidden_states(layer: AttentionLayer, hidden_states: torch.Tensor) -> None:
    """Refuse what ``layer`` can't read alone and causally; ``hidden_states`` [B, L, hidden].

    Raises:
        InputError: hidden states of another shape or with NaN or infinity, or an attention that isn't plain causal
            softmax over this length.
    """
    if not isinstance(layer, AttentionLayer):
        raise InputError(f"The layer is what load_attention() gives, not {type(layer).__name__}.")
    if not isinstance(hidden_states, torch.Tensor) or hidden_states.ndim != 3 or not hidden_states.numel():
        what = list(hidden_states.shape) if isinstance(hidden_states, torch.Tensor) else type(hidden_states).__name__
        raise InputError(f"Hidden states are a tensor [batch, tokens, width] with something in it, not {what}.")
    _, n_tokens, width = hidden_states.shape
    if not getattr(layer.module, "is_causal", False):
        raise InputError(f"Layer {layer.index} ({type(layer.module).__name__}) is not causal self-attention.")
    if width != layer.config.hidden_size:
        raise InputError(f"Hidden states are {width} wide, and the layer takes {layer.config.hidden_size}.")
    if not torch.isfinite(hidden_states).all():
        bad = int((~torch.isfinite(hidden_states)).sum())
        raise InputError(f"The hidden states hold {bad:,} values that are NaN or infinite.")
    window = attention_window(layer.config, layer.index)
    if window is not None and n_tokens > window:
        raise InputError(
            f"Layer {layer.index} attends to the last {window} tokens only, not to all {n_tokens}: lower seq_len."
        )


def capture_digest(layer: AttentionLayer, hidden_states: torch.Tensor, prompt_length: int) -> str:
    """SHA-256 over everything that determines a capture: weights, configuration, input, lengths, dtype, definitions."""
    digest = hashlib.sha256()
    config = {key: value for key, value in layer.config.to_dict().items() if key != "transformers_version"}
    settings = [config, layer.index, layer.device.type, prompt_length, WINDOW, DECAY]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in [*layer.module.state_dict().items(), ("hidden_states", hidden_states)]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(memoryview(tensor.cpu().contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()


def eager_attention_weights(layer: AttentionLayer, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention probabilities [B, H, L, L] as transformers' own eager attention returns them, in the layer's dtype.

    This builds the whole matrix: it is the check of :func:`capture_attention` at a length where that fits.
    """
    n_tokens = hidden_states.shape[1]
    future = torch.full((n_tokens, n_tokens), torch.finfo(hidden_states.dtype).min, device=hidden_states.device).triu(1)
    mask = future.to(hidden_states.dtype)[None, None]
    with torch.no_grad(), Float32Products(), attention_implementation(layer.module, "eager"):
        _, weights = layer.module(hidden_states, layer.position_embeddings(hidden_states), mask)
    return weights


# -- the attention implementation

_RECORDING: WeakKeyDictionary[nn.Module, ColumnSums] = WeakKeyDictionary()
# Where one module is run for a part of its heads at a time: the number of the part's first head.
_FIRST_HEAD: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def _column_sums_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal softmax attention that records column sums where somebody asks for them; transformers' interface.

    ``query`` [B, H, N, width], ``key`` and ``value`` [B, KV, M, width]; ``attention_mask`` [B, M], False for padding,
    as :func:`_padding_mask` makes it -> output [B, N, H, value width].
    """
    name = type(module).__name__
    changed = [part for part in ("softcap", "s_aux", "position_bias") if kwargs.get(part) is not None]
    if changed:
        raise InputError(f"{name} changes its softmax ({', '.join(changed)}): it is not supported.")
    if not kwargs.get("is_causal", getattr(module, "is_causal", False)):
        raise InputError(f"{name} is not causal self-attention: it can't be recorded.")
    if dropout:
        raise InputError(f"{name} drops attention at random: call eval() on the model before it is recorded.")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(f"{name} masks more than padding and the future: its attention can't be recorded.")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise InputError("Recording attention keeps no gradients: run the model under torch.no_grad().")
    batch, heads, n_queries, _ = query.shape
    n_keys = key.shape[2]
    real = None if attention_mask is None else attention_mask.bool()
    record = _RECORDING.get(module)
    products = multiplies_in(query.dtype, query.device)
    if record is None:
        weights, sums = (torch.zeros(0, batch, n, device=query.device) for n in (n_queries, heads))
        sums = sums[..., None]
    else:
        first = _FIRST_HEAD.get(module)
        if first is None:  # all heads at once
            record.start(batch, heads, n_queries, n_keys, query.device)
            first = 0
        weights = record.query_weights(n_queries, n_keys, real).expand(-1, batch, -1)
        sums = record.sums[:, :, first : first + heads]
    if query.is_cuda and find_spec("triton"):  # torch's CUDA builds bring it
        from helpers import fused

        return fused.attention_and_column_sums(query, key, value, scaling, weights, sums, real=real), None
    progress = record.progress if record is not None else None
    return attention_and_column_sums(
        query, key, value, scaling, weights, sums, real=real, products=products, progress=progress
    ), None


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return what ``column_sums`` wants as mask: [B, kv_length], False for padding, or None; transformers' interface.

    Raises:
        InputError: a mask that isn't causal over all earlier tokens (sliding windows, packed sequences, prefixes that
            see each other), or keys beyond the last query (static caches).
    """
    if kv_offset or int(q_offset) + q_length != kv_length:
        raise InputError(
            "Attention can be recorded with a cache that grows (DynamicCache), not with a static or sliding one."
        )
    queries = torch.arange(int(q_offset), kv_length, device=device)
    samples, zero = torch.arange(batch_size, device=device)[:, None], queries.new_zeros(())
    sees_first = mask_function(samples, zero, queries, zero)
    sees_next = mask_function(samples, zero, queries[:-1], queries[1:])
    if not torch.as_tensor(sees_first).all() or torch.as_tensor(sees_next).any():
        raise InputError(
            "Only attention to all earlier tokens can be recorded, not sliding windows beyond their width, packed "
            "sequences or prefixes that see their own future."
        )
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask[:, :kv_length].bool()


AttentionInterface.register(IMPLEMENTATION, _column_sums_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _padding_mask)


# -- one layer alone


def _forward(layer: AttentionLayer, hidden_states: torch.Tensor, captured: Capture) -> torch.Tensor:
    """Run the layer's module, all heads at once or, where a long MLA layer's keys are large, some at a time."""
    module: Any = layer.module
    batch, n_tokens, _ = hidden_states.shape
    rotary = layer.position_embeddings(hidden_states)
    n_heads, at_once = layer.n_heads, heads_at_once(module, layer.n_heads, batch * n_tokens, layer.dtype)
    if at_once == n_heads:
        _RECORDING[module] = captured
        try:
            output: torch.Tensor = module(hidden_states, rotary, None)[0]
        finally:
            del _RECORDING[module]
        return output
    captured.start(batch, n_heads, n_tokens, n_tokens, hidden_states.device)
    attended = hidden_states.new_empty(batch, n_tokens, module.o_proj.in_features)
    for first, part in _parts(module, hidden_states, n_heads, at_once):
        _RECORDING[part], _FIRST_HEAD[part] = captured, first
        done, _ = part(hidden_states, rotary, None)
        width = attended.shape[-1] // n_heads
        attended[..., first * width : first * width + done.shape[-1]] = done
    projected: torch.Tensor = module.o_proj(attended)
    return projected


def _parts(module: Any, hidden_states: torch.Tensor, n_heads: int, at_once: int) -> Iterator[tuple[int, nn.Module]]:
    """Yield (first head, module for ``at_once`` heads from there) of an MLA module, without copying a weight.

    Each part is the module itself with fewer rows in the projections that expand latents to heads, with the latents
    given (they are the same for all heads), and without the output projection.
    """
    module = _with(module, o_proj=nn.Identity(), kv_a_proj_with_mqa=_Given(module.kv_a_proj_with_mqa(hidden_states)))
    expands_query = "q_b_proj" if getattr(module, "q_b_proj", None) is not None else "q_proj"
    if expands_query == "q_b_proj":
        module = _with(module, q_a_proj=_Given(module.q_a_proj(hidden_states)))
    for first in range(0, n_heads, at_once):
        share = slice(first, min(first + at_once, n_heads))
        names = (expands_query, "kv_b_proj")
        yield first, _with(module, **{name: _heads_of(getattr(module, name), share, n_heads) for name in names})


class _Given(nn.Module):
    """Stands for a projection whose result is known."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.result


def _with(module: Any, **parts: nn.Module) -> Any:
    """A module that shares everything with ``module`` but for these submodules."""
    twin = copy.copy(module)
    twin._modules = module._modules | parts
    return twin


def _heads_of(projection: Any, share: slice, n_heads: int) -> nn.Module:
    """The rows of ``projection`` [heads x width, in] that belong to the heads of ``share``; weights are views."""
    width = projection.out_features // n_heads
    rows = slice(share.start * width, share.stop * width)
    part = nn.Linear(projection.in_features, rows.stop - rows.start, bias=False, device="meta")
    part.weight = nn.Parameter(projection.weight[rows], requires_grad=False)
    if projection.bias is not None:
        part.bias = nn.Parameter(projection.bias[rows], requires_grad=False)
    return part


@contextmanager
def attention_implementation(module: nn.Module, name: str = IMPLEMENTATION) -> Iterator[None]:
    """Let one layer's module compute its softmax part with transformers' attention implementation ``name``.

    By default that is this module's own, whose memory doesn't grow with tokens² and which needs no mask to be causal.
    """
    config: Any = module.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _progress(captured: Capture, batch: int, heads: int, n_tokens: int) -> Iterator[None]:
    """Show tokens done, rate and time left once the capture takes long; a token counts as its share of all pairs."""
    total = batch * n_tokens
    pairs = total * heads * (n_tokens + 1) // 2
    with tqdm(
        total=total,
        desc="Capturing attention",
        unit=" tokens",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:,.0f}/{total:,} tokens [{elapsed}<{remaining}, {rate_fmt}]",
        delay=PROGRESS_AFTER_S,
        leave=False,
    ) as bar:
        captured.progress = lambda done: bar.update(min(done * total / pairs, total - bar.n))
        yield
    captured.progress = None
