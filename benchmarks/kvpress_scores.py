"""Our scores against kvpress's observed-attention scorer, on one layer of SmolLM2: the same numbers, time and memory.

kvpress 0.5.5 needs transformers below 5.3, so it runs in an environment of its own:

    python -m venv .venv-kvpress
    .venv-kvpress/bin/pip install torch==2.13.0 "transformers<5.3" kvpress==0.5.5
    make checkpoint-smollm2
    .venv/bin/python benchmarks/kvpress_scores.py --python .venv-kvpress/bin/python

kvpress scores a key with its mean attention over the queries that see it, averaged over the query heads that share it.
From the attention mass that is mass / (number of queries that see the token), averaged over the group. Both sides run
the model's first layer in float32 on the same tokens, whole: embeddings, attention, feed-forward.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def kvpress_scores(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    from kvpress import ObservedAttentionPress

    class Scores(ObservedAttentionPress):
        """Keeps the score, drops no token."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            self.scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
            return keys, values

    press = Scores()
    with press(model):
        model.model(ids)
    return press.scores[0]


def our_scores(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    from helpers.capture import record_attention

    with record_attention(model) as layers:
        model.model(ids)
    mass = layers[0].mass[0]
    visible_queries = torch.arange(mass.shape[-1], 0, -1)
    return (mass / visible_queries).view(model.config.num_key_value_heads, -1, mass.shape[-1]).mean(dim=1)


SIDES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "kvpress": (kvpress_scores, "eager"),
    "ours": (our_scores, "sdpa"),
}


def memory(field: str) -> int:
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(kilobytes) * 1024


@torch.no_grad()
def measure(side: str, checkpoint: str, n: int, out: str) -> None:
    """Write the scores [KV heads, n] to ``out``; print seconds and extra peak memory."""
    scores, attention = SIDES[side]
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, num_hidden_layers=1, attn_implementation=attention, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
    scores(model, ids[:, :64])
    Path("/proc/self/clear_refs").write_text("5")
    before, times = memory("VmRSS"), []
    while not times or (len(times) < 5 and sum(times) < 5):
        started = time.perf_counter()
        result = scores(model, ids)
        times.append(time.perf_counter() - started)
    save_file({"scores": result.contiguous()}, out)
    print(json.dumps({"seconds": min(times), "extra_bytes": memory("VmHWM") - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-kvpress/bin/python", help="Python of the environment with kvpress")
    parser.add_argument("--checkpoint", default="checkpoints/smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        side, n, out = arguments.measure
        measure(side, arguments.checkpoint, int(n), out)
        return
    for needed in (arguments.python, arguments.checkpoint):
        if not Path(needed).exists():
            sys.exit(f"Error: {needed} does not exist: the first lines of {Path(__file__).name} say how to make it.")
    print("| tokens | kvpress, s | ours, s | kvpress ÷ ours | kvpress, MB | ours, MB | largest relative difference |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for n in arguments.lengths:
        found, scores = {}, {}
        for side, python in (("kvpress", arguments.python), ("ours", sys.executable)):
            with tempfile.TemporaryDirectory() as folder:
                out = f"{folder}/scores.safetensors"
                command = [python, __file__, "--checkpoint", arguments.checkpoint, "--measure", side, str(n), out]
                result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found[side], scores[side] = json.loads(result.stdout.splitlines()[-1]), load_file(out)["scores"]
        difference = ((scores["ours"] - scores["kvpress"]).abs() / scores["kvpress"]).max()
        theirs, mine = found["kvpress"], found["ours"]
        print(
            f"| {n:,} | {theirs['seconds']:.2f} | {mine['seconds']:.2f} | {theirs['seconds'] / mine['seconds']:.1f}× | "
            f"{theirs['extra_bytes'] / 1e6:,.0f} | {mine['extra_bytes'] / 1e6:,.0f} | {difference:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
