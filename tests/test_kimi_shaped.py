"""Full-size layer 0 of Kimi K2.6 with random weights: bytes, memory, and the figures that random weights must give."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import check_same_report

from helpers.capture import capture_attention
from helpers.checkpoint import Checkpoint
from helpers.cli import main
from helpers.inputs import random_embeddings
from helpers.kimi_shaped import ATTENTION_AND_NORMS, FEED_FORWARD, write_kimi_shaped
from helpers.layer import load_attention, skeleton
from helpers.paths import project_root
from helpers.policies import evict
from helpers.scores import attention_mass, describe_eviction, squared_correlation, uniform_causal_null

SAMPLE = project_root() / "results/sample-kimi-shaped"


@pytest.fixture(scope="module")
def kimi_shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("full-size") / "kimi-k2.6-shaped"
    write_kimi_shaped(folder)
    yield folder
    (folder / "model-00001-of-000064.safetensors").unlink()  # 202 MB that nobody needs afterwards


def test_shapes_are_those_that_transformers_builds_from_the_config(kimi_shaped: Path) -> None:
    layer = skeleton(Checkpoint.open(kimi_shaped), 0).layers[0]
    built = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert built == ATTENTION_AND_NORMS | FEED_FORWARD


def test_loading_reads_the_seven_tensors_and_headers_and_nothing_more(kimi_shaped: Path) -> None:
    checkpoint = Checkpoint.open(kimi_shaped)
    layer = load_attention(checkpoint, layer=0)
    assert layer.report.summary == "7 of 7 tensors matched, 101,124,096 parameters, 202,248,192 bytes read"
    with (kimi_shaped / "model-00001-of-000064.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert checkpoint.bytes_read == 202_248_192 + header
    assert layer.module.scaling == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)


MEASURE = """
import re, sys
from pathlib import Path
from helpers.checkpoint import Checkpoint
from helpers.layer import load_attention, skeleton

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

checkpoint = Checkpoint.open(sys.argv[1])
skeleton(checkpoint, 0)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = resident("VmRSS")
layer = load_attention(checkpoint, layer=0)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_of_the_load_is_at_most_1_2_times_the_tensors(kimi_shaped: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(kimi_shaped)], capture_output=True, text=True, check=True
    )
    assert 0.9 * 202_248_192 < int(result.stdout) <= 1.2 * 202_248_192


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_weights_give_the_demos_figures(tmp_path: Path, seed: int) -> None:
    """What the published demo reports of real weights, random weights of the same shapes report too."""
    write_kimi_shaped(tmp_path / "kimi", seed=seed)
    layer = load_attention(Checkpoint.open(tmp_path / "kimi"), layer=0)
    (tmp_path / "kimi/model-00001-of-000064.safetensors").unlink()
    null = uniform_causal_null(256, 64)

    def figures(embedding_std: float) -> tuple[dict, float]:
        hidden_states = random_embeddings(256, 7168, embedding_std, seed, torch.bfloat16)
        score = attention_mass(capture_attention(layer, hidden_states).first_sample())
        return describe_eviction(score, evict(score, 4, 32, 64)), squared_correlation(score, null)

    wide, _ = figures(embedding_std=1.0)
    assert wide["score_mean"] == pytest.approx(64, abs=0.001)
    assert 63 <= wide["score_std"] <= 67
    assert 3.4 <= wide["heavy_to_evicted"] <= 3.8
    assert 50 <= wide["heavy_among_earliest"] <= 64
    assert (wide["counts"]["kept"], wide["counts"]["evicted"]) == (100, 156)
    assert (round(wide["shares"]["kept"], 3), round(wide["shares"]["evicted"], 3)) == (0.391, 0.609)

    narrow, explained = figures(embedding_std=0.02)
    assert narrow["score_mean"] == pytest.approx(64, abs=0.001)
    assert 3.48 <= narrow["heavy_to_evicted"] <= 3.51
    assert narrow["heavy_among_earliest"] >= 62
    assert explained >= 0.999


def test_the_committed_sample_is_what_the_report_makes(kimi_shaped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "again"
    assert main(["report", f"CHECKPOINT={kimi_shaped}", f"RUN_DIR={run_dir}"]) == 0
    check_same_report(run_dir, SAMPLE)
    summary = json.loads((SAMPLE / "summary.json").read_text())
    assert "RANDOM" in summary["weights"]
