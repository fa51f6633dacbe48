"""How long all policies at all budgets take on one layer, and what each part of it costs.

``python benchmarks/policies.py [checkpoint]``: layer 0 of the checkpoint, 4,096 prompt tokens and 512 that judge,
random embeddings. One kept set is also judged the plain way, by torch's own masked attention, beside ours.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from torch import nn

from helpers.capture import prompt_statistics
from helpers.checkpoint import Checkpoint
from helpers.comparison import compare, curve_budgets
from helpers.inputs import random_embeddings
from helpers.layer import load_attention
from helpers.metrics import output_errors
from helpers.parameters import Parameters
from helpers.policies import control_score, kept_tokens
from helpers.projections import queries_keys_values

PROMPT, CONTINUATION = 4096, 512


def main(checkpoint: str) -> None:
    """Print a line a part, in seconds."""
    parameters = Parameters.check({"seq_len": PROMPT, "continuation": CONTINUATION, "checkpoint": checkpoint})
    ckpt = Checkpoint.open(checkpoint)
    layer = load_attention(ckpt)
    hidden_states = random_embeddings(PROMPT + CONTINUATION, ckpt.config.hidden_size, 1.0, 0, layer.dtype)
    prompt_statistics(layer, hidden_states[:, :256], 128)  # what is slow only once

    started = time.perf_counter()
    captured = prompt_statistics(layer, hidden_states, PROMPT)
    capture = time.perf_counter() - started
    started = time.perf_counter()
    table = compare(layer, hidden_states, captured, parameters)
    judged = time.perf_counter() - started
    n_online = (table["start"] != "one-shot").sum()
    n_budgets = len(curve_budgets(parameters))
    print(f"{ckpt.name}: {PROMPT:,} + {CONTINUATION:,} tokens, {layer.n_heads} heads, {n_budgets} budgets")
    print(f"one capture {capture:.1f} s; {len(table)} kept sets, {n_online} of them online, {judged:.1f} s")
    print(f"in all {capture + judged:.1f} s")

    query, key, value = queries_keys_values(layer, hidden_states)
    kept = kept_tokens(control_score("random", PROMPT), 4, 32, PROMPT // 4)
    started = time.perf_counter()
    error = output_errors(layer, query[:, PROMPT:], key, value, [kept] * 8).before[0]
    ours = (time.perf_counter() - started) / 8
    started = time.perf_counter()
    plain = masked_error(layer.scaling, query[:, PROMPT:], key, value, kept)
    theirs = time.perf_counter() - started
    print(
        f"one kept set: torch's masked attention takes {theirs / ours:.1f} times ours (errors {error:.5f}, {plain:.5f})"
    )


def masked_error(scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: np.ndarray) -> float:
    """Relative error before the output projection, from two runs of scaled_dot_product_attention in float32."""
    n_queries, n_keys = query.shape[1], key.shape[1]
    causal = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    stays = nn.functional.pad(torch.from_numpy(kept), (0, n_queries), value=True)
    full, evicted = (
        nn.functional.scaled_dot_product_attention(
            query[None].float(), key[None].float(), value[None].float(), mask, scale=scale, enable_gqa=True
        )
        for mask in (causal, causal & stays)
    )
    return float((evicted - full).norm() / full.norm())


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["checkpoints/kimi-k2.6-shaped"]))
