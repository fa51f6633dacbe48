"""The command line: everything a person can get wrong gets one clear sentence, exit status 1, and no kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import papermill
import pytest
import torch
from nbclient.exceptions import DeadKernelError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from helpers.cli import main
from helpers.parameters import PRESETS, Parameters
from helpers.paths import project_root
from helpers.reports import execute
from helpers.runs import Run

Q_A = "language_model.model.layers.0.self_attn.q_a_proj.weight"
NOTEBOOK = "01_capture_attention"


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """No test but those marked with ``real_kernel`` may start a kernel, and SIGTERM's handler is put back."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was started")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if "real_kernel" not in request.fixturenames:
        monkeypatch.setattr(papermill, "execute_notebook", refuse)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def real_kernel() -> None:
    """Lets a test start kernels."""


def words(**values: object) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, which must be refused: exit status 1 and exactly one line, which is returned."""
    capsys.readouterr()
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("[transformers]")]  # its own advice on YaRN
    assert len(lines) == 1, err
    assert lines[0].startswith("Error: ")
    assert len(lines[0]) > len("Error: ") + 15
    assert "Traceback" not in err
    return lines[0]


def assert_recorded(folder: Path, message: str, tmp_path: Path) -> None:
    """The run folder holds a manifest that says ``failed`` and why, and nothing of where things lie on this machine."""
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    text = (folder / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["status"] == "failed"
    # the very sentence, but for paths
    assert set(re.findall(r"[\w=]+", manifest["error"])) <= set(re.findall(r"[\w=]+", message))
    assert len(manifest["error"]) > 15
    private = [str(tmp_path), tmp_path.name, str(project_root())]
    assert [word for word in private if word in text] == []


# -- a checkpoint that can't be used


def shard(checkpoint: Path, name: str = Q_A) -> Path:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / index["weight_map"][name]


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of the shard that holds ``Q_A``, and let the index follow."""
    file = shard(checkpoint)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index_path = checkpoint / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    others = {name: at for name, at in index["weight_map"].items() if at != file.name}
    index["weight_map"] = others | dict.fromkeys(tensors, file.name)
    index_path.write_text(json.dumps(index))


def reindex(checkpoint: Path, **weight_map: str | None) -> None:
    """Change where the index puts tensors; None takes one out. The shards stay."""
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    changed = index["weight_map"] | weight_map
    path.write_text(json.dumps({"weight_map": {name: at for name, at in changed.items() if at is not None}}))


def cut(checkpoint: Path, keep: Callable[[int], int]) -> None:
    file = shard(checkpoint)
    file.write_bytes(file.read_bytes()[: keep(file.stat().st_size)])


def reconfigure(checkpoint: Path, **text_config: object) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= text_config
    path.write_text(json.dumps(config))


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 1234\n"

DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda c: (c / "config.json").unlink(), ["small-kimi has no config.json"]),
    "a config that is no JSON": (lambda c: (c / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
    "a config that is a list": (lambda c: (c / "config.json").write_text("[]"), ["config.json", "JSON object"]),
    "no model type": (lambda c: reconfigure(c, model_type=None), ["no model_type"]),
    "an unknown model type": (
        lambda c: reconfigure(c, model_type="deepseek_v33"), ["'deepseek_v33'", "Did you mean 'deepseek_v3'?"]),
    "a config of the wrong types": (lambda c: reconfigure(c, hidden_size="wide"), ["config.json", "hidden_size"]),
    "no weights": (
        lambda c: (c / "model.safetensors.index.json").unlink(), ["neither model.safetensors.index.json", "nor"]),
    "an index that is no JSON": (
        lambda c: (c / "model.safetensors.index.json").write_text("<html>"),
        ["model.safetensors.index.json", "not valid JSON"]),
    "an index without a map": (
        lambda c: (c / "model.safetensors.index.json").write_text("{}"), ["index.json", "has no weight_map"]),
    "a shard that the index names and that isn't there": (
        lambda c: shard(c).unlink(), ["model-0000", "of small-kimi is missing", "the index names it"]),
    "a shard outside the folder": (lambda c: reindex(c, **{Q_A: "../secret.safetensors"}), ["'../secret.safetensors'"]),
    "a shard cut short": (lambda c: cut(c, lambda size: size - 1), ["model-0000", "is cut short", "fetch it again"]),
    "a shard cut in its header": (lambda c: cut(c, lambda _: 100), ["model-0000", "is cut short inside its header"]),
    "an empty shard": (lambda c: cut(c, lambda _: 0), ["model-0000", "is cut short (0 bytes)"]),
    "a Git LFS pointer": (
        lambda c: shard(c).write_text(LFS_POINTER), ["model-0000", "Git LFS pointer", "git lfs pull"]),
    "a Git LFS pointer for the config": (
        lambda c: (c / "config.json").write_text(LFS_POINTER), ["config.json of small-kimi", "Git LFS pointer"]),
    "a Git LFS pointer for the index": (
        lambda c: (c / "model.safetensors.index.json").write_text(LFS_POINTER), ["index.json", "Git LFS pointer"]),
    "no layers": (lambda c: reconfigure(c, num_hidden_layers=0), ["num_hidden_layers as 0", "a whole number from 1"]),
    "no heads": (lambda c: reconfigure(c, num_attention_heads=0), ["num_attention_heads as 0"]),
    "an unknown activation": (lambda c: reconfigure(c, hidden_act="foo"), ["builds no causal decoder", "know 'foo'"]),
    "a web page for a shard": (lambda c: shard(c).write_text("<!doctype html>" * 9), ["is not a safetensors file"]),
    "a shard with a header that is no JSON": (
        lambda c: shard(c).write_bytes(struct.pack("<Q", 4) + b"nope"), ["unreadable header"]),
    "a tensor that is missing": (
        lambda c: rewrite(c, lambda t: t.pop(Q_A)), [f"'{Q_A}' is missing"]),
    "a tensor that is missing from the index": (lambda c: reindex(c, **{Q_A: None}), [f"'{Q_A}' is missing"]),
    "a tensor that the shard doesn't hold": (
        lambda c: reindex(c, **{Q_A: next(f.name for f in sorted(c.glob("model-*")) if f != shard(c))}),
        [f"puts '{Q_A}' into model-0000", "doesn't hold it"]),
    "a tensor that is renamed": (
        lambda c: rewrite(c, lambda t: t.update({Q_A.replace("q_a", "q_down"): t.pop(Q_A)})),
        [f"'{Q_A}' is missing", "Did you mean", "q_down_proj.weight'?"]),
    "a tensor that nothing reads": (
        lambda c: rewrite(c, lambda t: t.update({Q_A.replace("q_a", "extra"): t[Q_A].clone()})),
        ["extra_proj.weight' has no place"]),
    "a tensor of another shape": (
        lambda c: rewrite(c, lambda t: t.update({Q_A: t[Q_A][:-1].contiguous()})),
        [f"'{Q_A}' has shape [23, 64], not [24, 64]"]),
    "a quantised tensor": (
        lambda c: rewrite(c, lambda t: t.update({Q_A: t[Q_A].to(torch.float8_e4m3fn)})),
        [f"'{Q_A}' is stored as F8_E4M3"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    damage: str, mla_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, key_words = DAMAGES[damage]
    change(mla_checkpoint)
    run_dir = tmp_path / "runs" / "one"
    message = error_of(["report", *words(checkpoint=mla_checkpoint, run_dir=run_dir)], capsys)
    assert [word for word in key_words if word not in message] == []
    assert_recorded(run_dir, message, tmp_path)
    assert [path.name for path in run_dir.parent.iterdir()] == ["one"]


def test_the_same_checkpoint_undamaged_would_start_a_kernel(mla_checkpoint: Path, tmp_path: Path) -> None:
    """Without this, the tests above could pass for some other reason."""
    with pytest.raises(AssertionError, match="a kernel was started"):
        main(["report", *words(checkpoint=mla_checkpoint, run_dir=tmp_path / "one")])


# -- parameters that can't be


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "no-texts").mkdir(parents=True)
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "short.txt").write_text("words|words|words")
    (folder / "some-bad").mkdir()
    (folder / "some-bad/a.txt").write_text("|".join(["words"] * 400))
    (folder / "some-bad/b.txt").write_bytes(b"caf\xe9 au lait")
    return folder


@pytest.fixture
def text_checkpoint(mla_checkpoint: Path) -> Path:
    """The small checkpoint with a tokenizer, which splits at every bar."""
    tokenizer = Tokenizer(WordLevel({"words": 0}, unk_token="words"))
    tokenizer.pre_tokenizer = Split("|", behavior="removed")
    tokenizer.save(str(mla_checkpoint / "tokenizer.json"))
    return mla_checkpoint


@pytest.mark.parametrize(
    ("bad", "key_words"),
    [
        (["layer=3"], ["layer 3 is out of range", "layers 0 to 2"]),
        (["layer=-1"], ["layer must be at least 0, not -1"]),
        (["seq_lenn=3"], ["Unknown parameter 'seq_lenn'", "Did you mean 'seq_len'?"]),
        (["notebook=01"], ["Unknown parameter 'notebook'", "Did you mean 'notebooks'?"]),
        (["seq_len=many"], ["seq_len takes a whole number, not 'many'"]),
        (["seq_len=1.5"], ["seq_len takes a whole number, not '1.5'"]),
        (["seq_len="], ["seq_len takes a whole number, not ''"]),
        (["embedding_std=nan"], ["embedding_std takes a number, not nan"]),
        (["embedding_std=-1"], ["embedding_std must be at least 0, not -1.0"]),
        (["n_sink=-4"], ["n_sink must be at least 0, not -4"]),
        (["n_recent=-1"], ["n_recent must be at least 0, not -1"]),
        (["budget=-64"], ["budget must be at least 0, not -64"]),
        (["continuation=-1"], ["continuation must be at least 0, not -1"]),
        (["seed=-1"], ["seed must be at least 0, not -1"]),
        ([f"seed={2**64}"], ["seed", str(2**64 - 1)]),
        (["seq_len=0"], ["seq_len must be at least 1, not 0"]),
        (["seq_len=449"], ["seq_len 449 + continuation 64", "512 positions", "at most 448"]),
        (["seq_len=64", "n_sink=40", "n_recent=40"], ["n_sink 40", "n_recent 40", "seq_len 64"]),
        (["dtype=float8"], ["dtype must be one of bfloat16, float16, float32"]),
        (["input=both"], ["input must be one of auto, random, text"]),
        (["device=gpu"], ["device must be one of auto, cpu, cuda, not 'gpu'."]),
        (["input=random", "dtype=float16", "embedding_std=9000"], ["embedding_std 9000", "float16", "lower"]),
        (["notebooks=09"], ["There is no notebook '09'", "01,02,03"]),
        (["notebooks=01,"], ["There is no notebook ''"]),
        (["notebooks=1"], ["There is no notebook '1'", "01,02,03"]),
        (["preset=dmo"], ["There is no preset 'dmo'", "Did you mean 'demo'?"]),
        (["input=text", "text=TEXTS/no-such.txt"], ["Text file", "no-such.txt", "does not exist"]),
        (["input=text", "text=TEXTS/empty.txt"], ["Text file", "empty.txt", "is empty"]),
        (["input=text", "text=TEXTS/blank.txt"], ["Text file", "blank.txt", "is empty"]),
        (["input=text", "text=TEXTS/latin.txt"], ["Text file", "latin.txt", "is not UTF-8", "byte 3"]),
        (["input=text", "text=TEXTS/no-texts"], ["no-texts", "holds no .txt file"]),
        (["input=text", "text=/dev/null"], ["'/dev/null' is no regular file"]),
        (["checkpoint=TEXTS/latin.txt"], ["latin.txt' is a file, not a folder"]),
        (["input=text", "text=TEXTS/short.txt"], ["short.txt has 3 tokens", "asks for 320"]),
        (["text="], ["text is empty"]),
        (["checkpoint="], ["checkpoint is empty"]),
        (["notebooks=01, 4"], ["There is no notebook '4'", "01,02,03,04"]),
        (["input=text", "text=TEXTS/some-bad", "notebooks=01, 04"], ["some-bad/b.txt' is not UTF-8", "save it as"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_an_impossible_parameter_is_refused_with_the_right_name_or_range(
    bad: list[str],
    key_words: list[str],
    text_checkpoint: Path,
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "runs" / "one"
    given = [word.replace("TEXTS", str(texts)) for word in bad]
    if not any(word.startswith("checkpoint=") for word in given):
        given += words(checkpoint=text_checkpoint)
    message = error_of(["report", *given, *words(run_dir=run_dir)], capsys)
    assert [word for word in key_words if word not in message] == []
    assert_recorded(run_dir, message, tmp_path)
    assert [path.name for path in run_dir.parent.iterdir()] == ["one"]


def test_a_missing_checkpoint_is_refused_with_where_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(["report", *words(checkpoint=tmp_path / "no-such", run_dir=tmp_path / "one")], capsys)
    assert f"'{tmp_path}/no-such' does not exist" in message
    assert "make checkpoint-kimi-shaped" in message
    assert_recorded(tmp_path / "one", message, tmp_path)


def test_text_without_a_tokenizer_is_refused_with_what_works(
    mla_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(["report", *words(checkpoint=mla_checkpoint, input="text", run_dir=tmp_path / "one")], capsys)
    assert "small-kimi has no tokenizer" in message
    assert "input=random" in message
    assert_recorded(tmp_path / "one", message, tmp_path)


def test_a_gpu_that_is_not_there_is_refused(
    mla_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = error_of(["report", *words(checkpoint=mla_checkpoint, device="cuda", run_dir=tmp_path / "one")], capsys)
    assert "device=cuda, but torch sees no GPU" in message
    assert_recorded(tmp_path / "one", message, tmp_path)


@pytest.mark.parametrize("name", ["input", "layer", "dtype"])
def test_a_path_given_to_the_wrong_parameter_is_not_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """INPUT=/home/me/words.txt where TEXT= was meant: the sentence may show it, the manifest may not."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")  # whose paths are taken out anyway
    message = error_of(["report", *words(**{name: tmp_path / "words.txt"}, run_dir=tmp_path / "one")], capsys)
    assert name in message
    assert_recorded(tmp_path / "one", message, tmp_path)


def test_a_path_through_a_link_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Home and scratch folders are often links, and an error names a path as it was typed."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    (tmp_path / "disk").mkdir()
    (tmp_path / "wilhelmina").symlink_to("disk")
    error_of(["report", *words(checkpoint=tmp_path / "wilhelmina" / "no-such", run_dir=tmp_path / "one")], capsys)
    assert "wilhelmina" not in (tmp_path / "one" / "manifest.json").read_text()


# -- words that are no parameters, and commands that are none


@pytest.mark.parametrize(
    ("arguments", "key_words"),
    [
        (["report", "seq_len"], ["'seq_len' is no parameter", "name=value"]),
        (["report", "=3"], ["'=3' is no parameter"]),
        (["report", "seq_len=3", "SEQ_LEN=4"], ["seq_len is given twice"]),
        (["report", "seq_len=3", "seq_len=3"], ["seq_len is given twice"]),
        (["reprot"], ["reprot", "report"]),
        ([], ["command", "--help"]),
        (["report", "--layer=3"], ["--layer=3"]),
        (["report", "--hel"], ["--hel"]),
        (["checkpoint-kimi-shaped", "sed=3"], ["Unknown parameter 'sed'", "Did you mean 'seed'?"]),
        (["checkpoint-kimi-shaped", "seed=-3"], ["seed takes a whole number", "not '-3'"]),
        (["checkpoint-kimi-shaped", f"seed={2**64}"], ["seed takes a whole number from 0 to 2**64 - 1"]),
        (["checkpoint-kimi-shaped", "seed=" + "9" * 5000], ["seed takes a whole number from 0 to 2**64 - 1"]),
        (["checkpoint-kimi-shaped", "full=yes"], ["full takes a whole number", "not 'yes'"]),
        (["checkpoint-smollm2", "seed=3"], ["Unknown parameter 'seed'", "checkpoint-smollm2 takes none"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_word_that_is_none_is_refused(
    arguments: list[str], key_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments + words(run_dir=tmp_path / "one") if arguments[:1] == ["report"] else arguments
    message = error_of(arguments, capsys)
    assert [word for word in key_words if word not in message] == []
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_parameter_with_its_default_and_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["report", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Parameters):
        default = Parameters().values()[field.name]
        default = ",".join(default) if isinstance(default, list) else str(default)
        default = re.escape(default or "empty")
        assert re.search(rf"^  {field.name} .*\[{default}\]$", shown, flags=re.MULTILINE), field.name
    assert all(preset in shown for preset in PRESETS)


def test_names_may_be_in_capitals_as_make_writes_them(
    mla_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def note(path: Path, _: object, parameters: dict[str, Any], **__: object) -> None:
        given.update(parameters)
        raise KeyboardInterrupt

    monkeypatch.setattr(papermill, "execute_notebook", note)
    main(["report", f"CHECKPOINT={mla_checkpoint}", "PRESET=demo", "BUDGET=7", f"RUN_DIR={tmp_path / 'one'}"])
    expected = Parameters.check(
        PRESETS["demo"] | {"checkpoint": str(mla_checkpoint), "budget": 7, "run_dir": str(tmp_path / "one")}
    )
    assert given == expected.values()


def test_chosen_notebooks_run_in_their_order_and_once(
    mla_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
    main(["report", *words(checkpoint=mla_checkpoint, notebooks="02,01,02", run_dir=tmp_path / "one")])
    assert list(Run(tmp_path / "one").manifest["steps"]) == [NOTEBOOK, "02_score_tokens", "report"]


def test_a_second_interrupt_does_not_leave_the_notebook_running(
    mla_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """make and its caller both hand on a signal; the second one comes while the first is being dealt with."""
    ended, attempts = threading.Event(), []

    def end_kernels() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise KeyboardInterrupt
        ended.set()

    def long_notebook(*_: object, **__: object) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        ended.wait(20)
        raise DeadKernelError

    monkeypatch.setattr(papermill, "execute_notebook", long_notebook)
    monkeypatch.setattr("helpers.reports._end_kernels", end_kernels)
    with pytest.raises(KeyboardInterrupt):
        execute(Parameters.check({"checkpoint": str(mla_checkpoint)}), {}, "01_capture_attention")
    assert ended.is_set()


# -- folders that are not this run's


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("bad", [[], ["layer=99"], ["seq_lenn=3"]], ids=str)
def test_a_folder_of_somebody_else_is_refused_and_left_alone(
    bad: list[str], mla_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    before = contents(tmp_path)
    message = error_of(["report", *words(checkpoint=mla_checkpoint, run_dir=tmp_path / "thesis"), *bad], capsys)
    assert bad or "run_dir 'thesis' is not a run folder, and not empty" in message
    assert contents(tmp_path) == before


def test_a_run_folder_below_a_file_is_refused(
    mla_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    message = error_of(["report", *words(checkpoint=mla_checkpoint, run_dir=tmp_path / "file" / "one")], capsys)
    assert "run_dir" in message
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def complete_run(mla_checkpoint: Path, tmp_path: Path) -> Path:
    """A complete run of layer 0, as its notebooks would have left it."""
    mine = Parameters(checkpoint=str(mla_checkpoint), run_dir=str(tmp_path / "runs" / "done"))
    run = Run.open_step(mine, NOTEBOOK)
    run.capture_once("d1", None, lambda: {"mass": torch.ones(2, 3)})
    run.update(checkpoint={}, tensors=[], input={}, shapes={})
    run.finish_step()
    run = Run.open_step(mine, "02_score_tokens")
    run.write_text("scores.csv", "scores")
    run.finish_step()
    assert run.manifest["status"] == "complete"
    return run.folder


@pytest.mark.parametrize(
    "bad", [["layer=99"], ["seq_lenn=3"], ["notebooks=09"], ["preset=no"], ["seq_len=0"], ["input=text"]], ids=str
)
def test_a_refused_start_leaves_a_complete_run_untouched(
    bad: list[str], complete_run: Path, mla_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(complete_run.parent)
    error_of(["report", *words(checkpoint=mla_checkpoint, run_dir=complete_run), *bad], capsys)
    assert contents(complete_run.parent) == before


def test_later_notebooks_alone_are_refused_in_a_run_of_another_layer_and_leave_it_untouched(
    complete_run: Path, mla_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notebook 02 of layer 1 can't work on a capture of layer 0; that is known before anything is removed."""
    before = contents(complete_run.parent)
    later = words(checkpoint=mla_checkpoint, run_dir=complete_run, layer=1, notebooks="02,03")
    message = error_of(["report", *later], capsys)
    assert "done is a run with another layer" in message
    assert contents(complete_run.parent) == before


def test_later_notebooks_alone_are_refused_without_a_capture_before_a_kernel_starts(
    mla_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = words(checkpoint=mla_checkpoint, run_dir=tmp_path / "one", notebooks="02,03")
    message = error_of(["report", *later], capsys)
    assert "one has no capture yet" in message
    assert NOTEBOOK in message


# -- parameters that stand where they are not read


def test_a_parameter_in_the_shell_s_environment_of_make_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEQ_LEN=0 make report looks right, and nothing reads it; make itself exports what was written behind it."""
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("SEQ_LEN", "0")
    monkeypatch.setenv("LAYER", "99")
    assert main(["report", "layer=99", "checkpoint=no-such", f"run_dir={tmp_path / 'run'}"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("Note: SEQ_LEN is a variable of the shell, which is not read: write it behind")
    assert second.startswith("Error: Checkpoint folder 'no-such'")


# -- the real thing


def test_the_command_ends_with_status_1_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "helpers", "report", "seq_lenn=3"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: Unknown parameter 'seq_lenn'. Did you mean 'seq_len'?")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_the_packages_says_which_one_has_them(tmp_path: Path) -> None:
    """As from the system's own Python, outside the environment."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    command = [sys.executable, "-m", "helpers", "report", "seq_len=3", "n_recent=0", "n_sink=0"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("Error: torch is not installed for this Python")
    assert "make report" in sentence


@pytest.mark.usefixtures("real_kernel")
def test_not_a_number_in_a_weight_fails_the_run_with_the_tensor_and_the_count(
    mla_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the values themselves show this, so a kernel has to read them."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_A][3, 5] = torch.nan
        tensors[Q_A][7] = torch.inf

    rewrite(mla_checkpoint, spoil)
    run_dir = tmp_path / "runs" / "one"
    small = words(checkpoint=mla_checkpoint, run_dir=run_dir, seq_len=16, continuation=0, n_recent=4, notebooks="01")
    assert main(["report", *small]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"Error: '{Q_A}' of small-kimi holds 65 NaN or infinite values")
    assert [path.name for path in run_dir.parent.iterdir()] == ["one"]  # no capture
    assert [path.name for path in run_dir.iterdir()] == ["manifest.json"]
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert f"Error: {manifest['error']}" == last
    assert "complete" not in {step["status"] for step in manifest["steps"].values()}
    assert str(tmp_path) not in (run_dir / "manifest.json").read_text()
