"""Capturing attention, side by side with what else there is: time and extra peak memory, as ratios.

    .venv/bin/python benchmarks/capture.py [--lengths 256 1024 … 16384] [--long 131072] [--out results/benchmarks]

Dimensions are Kimi K2.6's (64 heads, keys 192 and values 128 wide), BF16, batch 1. Each measurement is a process of its
own, one after another in one run. "Extra" memory is the peak above what is there before: inputs, weights, libraries.

The attention part, from queries, keys and values to output and column sums:

- ours: the capture's blocked pass;
- eager: transformers' eager attention and its matrix summed over queries, in BF16 as users run it;
- eager32: the same in float32, for processors without BF16 instructions, where BF16 products are slow;
- sdpa: torch's own causal attention, values padded to the keys' width so that it takes its flash kernel; output alone;
- products32: the two causal matrix products alone, block by block, as ours makes them: BF16 factors, float32 results;
- products: the same with results rounded to BF16, where the processor has BF16 instructions. Nothing can be faster.

The whole layer, from hidden states: layer (ours) and layer-eager (transformers, summed over queries).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from matplotlib.ticker import NullFormatter
from torch import nn
from tqdm import tqdm
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
    eager_attention_forward,
)

from helpers import plots
from helpers.capture import ColumnSums, capture_attention
from helpers.column_sums import attention_and_column_sums, multiplies_in, rows_at_once
from helpers.kimi_shaped import CONFIG
from helpers.layer import AttentionLayer, LoadReport
from helpers.products import float32_products_in, has_bfloat16_products

HEADS, WIDTH, V_WIDTH, SCALE = 64, 192, 128, 0.14467963
# the longest input of each method: matrices beyond it don't fit 24 GB, or take many minutes
METHODS = {
    "ours": 10**6, "products32": 10**6, "products": 10**6, "sdpa": 10**6, "eager": 4096, "eager32": 4096,
    "layer": 10**6, "layer-eager": 4096,
}  # fmt: skip


def inputs(n: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.cat([torch.randn(1, 1, n, width, generator=generator).to(dtype) for _ in range(HEADS)], dim=1)
        for width in (WIDTH, WIDTH, V_WIDTH)
    ]


def ours(n: int) -> Callable[[], object]:
    q, k, v = inputs(n)
    record = ColumnSums()

    def run() -> None:
        record.start(1, HEADS, n, n, q.device)
        weights = record.query_weights(n, n, None)
        attention_and_column_sums(q, k, v, SCALE, weights, record.sums, products=multiplies_in(q.dtype, q.device))

    return run


def products(n: int, dtype: torch.dtype | None = None) -> Callable[[], object]:
    fastest = multiplies_in(torch.bfloat16, torch.device("cpu"))
    q, k, v = (x[0].to(dtype or fastest) for x in inputs(n))
    rows = rows_at_once(n, n, 1)
    logits = torch.empty(rows * n, dtype=q.dtype)

    def run() -> None:
        for h in range(HEADS):
            keys = k[h].T
            for start in range(0, n, rows):
                end = min(start + rows, n)
                x = logits[: (end - start) * end].view(end - start, end)
                torch.mm(q[h, start:end], keys[:, :end], out=x)
                torch.mm(x, v[h, :end])

    def run_as_ours() -> None:
        with float32_products_in("bf16" if fastest == torch.bfloat16 else "ieee"):
            run()

    return run_as_ours


def sdpa(n: int) -> Callable[[], object]:
    q, k, v = inputs(n)
    v = nn.functional.pad(v, (0, WIDTH - V_WIDTH))
    return lambda: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)[..., :V_WIDTH]


def eager(n: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    q, k, v = inputs(n, dtype)
    mask = torch.full((n, n), torch.finfo(dtype).min).triu(1).to(dtype)[None, None]
    module = nn.Module().eval()
    module.num_key_value_groups = 1
    return lambda: eager_attention_forward(module, q, k, v, mask, SCALE)[1].sum(dim=2, dtype=torch.float32)


def layer(n: int) -> Callable[[], object]:
    attention, hidden_states = kimi_layer(n)
    return lambda: capture_attention(attention, hidden_states)


def layer_eager(n: int) -> Callable[[], object]:
    attention, hidden_states = kimi_layer(n)
    rotary = attention.position_embeddings(hidden_states)
    mask = torch.full((n, n), torch.finfo(torch.bfloat16).min).triu(1).bfloat16()[None, None]
    attention.module.config._attn_implementation = "eager"
    return lambda: attention.module(hidden_states, rotary, mask)[1].sum(dim=2, dtype=torch.float32)


def kimi_layer(n: int) -> tuple[AttentionLayer, torch.Tensor]:
    """A layer of K2.6's shapes with random weights, made in memory, and random embeddings."""
    torch.manual_seed(0)
    config = DeepseekV3Config(**json.loads(CONFIG.read_text())["text_config"])
    config._attn_implementation = "sdpa"
    module = DeepseekV3Attention(config, 0).to(torch.bfloat16).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02)
    rotary = DeepseekV3RotaryEmbedding(config)
    hidden_states = torch.cat(
        [torch.randn(1, 1024, config.hidden_size).bfloat16() for _ in range(-(-n // 1024))], dim=1
    )
    return AttentionLayer(module, config, 0, LoadReport({}, []), rotary), hidden_states[:, :n]


def memory(field: str) -> int:
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(kilobytes) * 1024


@torch.no_grad()
def measure(method: str, n: int) -> dict[str, Any]:
    """Seconds (the best of several for short inputs) and extra peak memory, in this process."""
    make = {
        "ours": ours, "products": products, "sdpa": sdpa, "eager": eager, "layer": layer, "layer-eager": layer_eager,
        "eager32": lambda n: eager(n, torch.float32), "products32": lambda n: products(n, torch.float32),
    }[method]  # fmt: skip
    make(128)()  # libraries start their threads
    run = make(n)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps from making the inputs would hide what comes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    times: list[float] = []
    while not times or (len(times) < 5 and sum(times) < 5):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return {"method": method, "tokens": n, "seconds": min(times), "extra_bytes": memory("VmHWM") - before}


def measure_apart(method: str, n: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", method, str(n)]
    quiet = os.environ | {"TQDM_DISABLE": "1"}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=quiet)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def exponent(table: pd.DataFrame, column: str) -> float:
    """Slope of log(column) against log(tokens), from 2,048 tokens up."""
    long = table[table["tokens"] >= 2048]
    return float(np.polyfit(np.log(long["tokens"]), np.log(long[column]), 1)[0])


def report(results: pd.DataFrame) -> str:
    """The README's table in Markdown, and what grows how."""
    seconds = results.pivot(index="tokens", columns="method", values="seconds")
    extra = results.pivot(index="tokens", columns="method", values="extra_bytes")
    rows = [
        "| tokens | ours, s | eager + sum ÷ ours | float32 eager ÷ ours | ours ÷ sdpa | ours ÷ two products | "
        "ours ÷ BF16 products | whole layer: eager ÷ ours | extra memory, MB | eager's ÷ ours |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for n in seconds.index:
        s, m = seconds.loc[n], extra.loc[n]
        ratios = [
            s.get("eager", np.nan) / s["ours"], s.get("eager32", np.nan) / s["ours"], s["ours"] / s.get("sdpa", np.nan),
            s["ours"] / s.get("products32", np.nan), s["ours"] / s.get("products", np.nan),
            s.get("layer-eager", np.nan) / s.get("layer", np.nan),
        ]  # fmt: skip
        shown = " | ".join("–" if np.isnan(ratio) else f"{ratio:.1f}×" for ratio in ratios)
        memory_ratio = m.get("eager", np.nan) / m["ours"]
        more = "–" if np.isnan(memory_ratio) else f"{memory_ratio:.0f}×"
        rows.append(f"| {n:,} | {s['ours']:.2f} | {shown} | {m['ours'] / 1e6:,.0f} | {more} |")
    mine = results[results["method"] == "ours"]
    if (mine["tokens"] >= 2048).sum() > 1:
        rows += [
            "",
            f"From 2,048 tokens up, time grows with tokens^{exponent(mine, 'seconds'):.2f}, extra memory with "
            f"tokens^{exponent(mine, 'extra_bytes'):.2f}.",
        ]
    native = "has" if has_bfloat16_products() else "has no"
    rows += ["", f"{torch.get_num_threads()} CPU threads; the processor {native} BF16 instructions."]
    return "\n".join(rows)


def figure(results: pd.DataFrame) -> plt.Figure:
    plots.use_style()
    drawn, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(11, 4.6))
    colours = sns.color_palette("colorblind", len(METHODS))
    for colour, marker, method in zip(colours, "o^sDvPX*", METHODS, strict=True):
        group = results[results["method"] == method]
        if len(group):
            style = {"color": colour, "marker": marker, "label": method}
            time_axes.loglog(group["tokens"], group["seconds"], **style)
            memory_axes.loglog(group["tokens"], group["extra_bytes"].clip(lower=1e6) / 1e9, **style)  # log has no 0
    time_axes.set(xlabel="tokens", ylabel="seconds", title="Time")
    memory_axes.set(xlabel="tokens", ylabel="GB above the inputs", title="Extra memory at the peak")
    drawn.legend(*time_axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(METHODS))
    lengths = sorted(results["tokens"].unique())
    for axes in (time_axes, memory_axes):
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--long", type=int, help="one more length, for the whole layer alone")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], int(arguments.measure[1]))))
        return
    jobs = [(method, n) for n in arguments.lengths for method in arguments.methods if n <= METHODS[method]]
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for method, n in (bar := tqdm(jobs)):
        bar.set_description(f"{method}, {n:,} tokens")
        found.append(measure_apart(method, n))
        results = pd.DataFrame(found)
        results.to_csv(arguments.out / "capture.csv", index=False)  # each time: some take minutes
    figure(results).savefig(arguments.out / "capture.png")
    print(report(results))
    if arguments.long:
        long = measure_apart("layer", arguments.long)
        print(
            f"\n{arguments.long:,} tokens, the whole layer: {long['seconds'] / 60:.1f} minutes, "
            f"{long['extra_bytes'] / 1e9:.1f} GB above weights and input."
        )


if __name__ == "__main__":
    main()
