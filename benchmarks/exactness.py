"""How exact captured attention mass is: against float64 computed from the very queries and keys that the layer made.

    make checkpoint-kimi-shaped checkpoint-smollm2
    .venv/bin/python benchmarks/exactness.py [--tokens 1024]

For each layer and dtype, over its heads: the largest relative error of a token's mass, and the largest total-variation
distance between a head's normalised masses and float64's (half the sum of absolute differences). Beside them those of
transformers' eager attention, whose logits and probabilities are rounded to the layer's dtype, and the largest logit: a
float32 logit is off by about 1e-7 of its size, and its probability, relatively, by as much as the logit absolutely.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AttentionInterface

from helpers.capture import attention_implementation, capture_attention, eager_attention_weights
from helpers.checkpoint import Checkpoint
from helpers.errors import InputError
from helpers.inputs import prepare_input
from helpers.layer import AttentionLayer, load_attention
from helpers.parameters import Parameters
from helpers.products import Float32Products

# random weights on random embeddings, and published weights on text: the first, a middle and the last layer
LAYERS = [("checkpoints/kimi-k2.6-shaped", 0), *(("checkpoints/smollm2-135m", layer) for layer in (0, 15, 29))]


def float64_mass(layer: AttentionLayer, hidden_states: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Mass [H, L] in float64, from the queries and keys that the module hands to its attention function.

    Also the largest logit's size.
    """
    kept: dict[str, torch.Tensor] = {}

    def keep(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        kept.update(query=query[0].double() * scaling, key=key[0].double())
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("keep", keep)
    with torch.no_grad(), Float32Products(), attention_implementation(layer.module, "keep"):
        layer.module(hidden_states, layer.position_embeddings(hidden_states), None)
    group = len(kept["query"]) // len(kept["key"])
    n_tokens = hidden_states.shape[1]
    future = torch.ones(n_tokens, n_tokens, dtype=torch.bool).triu(1)
    masses, largest = [], 0.0
    for head, q in enumerate(kept["query"]):
        logits = q @ kept["key"][head // group].T
        largest = max(largest, float(logits.tril().abs().max()))
        masses.append(logits.masked_fill(future, float("-inf")).softmax(dim=-1).sum(dim=0))
    return torch.stack(masses), largest


def error(mass: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest relative error of a token's mass in a head."""
    return float(((mass - truth).abs() / truth).max())


def distance(mass: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest total-variation distance of a head, with masses [H, L] normalised to 1."""
    mass, truth = (x.double() / x.double().sum(dim=1, keepdim=True) for x in (mass, truth))
    return float(0.5 * (mass - truth).abs().sum(dim=1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    n_tokens = parser.parse_args().tokens
    print("| checkpoint | layer | dtype | largest logit | relative error | eager's | distance | eager's |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for folder, index in LAYERS:
        for dtype in ("bfloat16", "float32"):
            parameters = Parameters.check(
                {"checkpoint": folder, "layer": index, "seq_len": n_tokens, "continuation": 0, "dtype": dtype}
            )
            checkpoint = Checkpoint.open(folder)
            layer = load_attention(checkpoint, index, parameters.torch_dtype())
            hidden_states = prepare_input(parameters, checkpoint, parameters.torch_dtype(), "cpu").hidden_states
            truth, largest = float64_mass(layer, hidden_states)
            mass = capture_attention(layer, hidden_states).mass[0]
            eager = eager_attention_weights(layer, hidden_states)[0].double().sum(dim=1)
            print(
                f"| {checkpoint.name} | {index} | {dtype} | {largest:.1f} | {error(mass, truth):.1e} | "
                f"{error(eager, truth):.1e} | {distance(mass, truth):.1e} | {distance(eager, truth):.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"Error: {error}")
