"""Run folders: whole files or none, a status that is true, and no artefact taken from a run of something else."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import papermill
import psutil
import pytest
import torch
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from safetensors import SafetensorError

import helpers.reports
from helpers.cli import main
from helpers.errors import InputError, NotebookError
from helpers.files import atomic_folder, atomic_path, write_bytes, write_text
from helpers.parameters import Parameters
from helpers.paths import NOTEBOOKS
from helpers.pipeline import run_report
from helpers.runs import Run, peak_memory_bytes

FIRST, SECOND, THIRD, _ = NOTEBOOKS.values()


# -- files: whole or not there


class OfNobodysError(Exception):
    """Stands for any error in the middle of writing."""


@pytest.mark.parametrize("error", [OfNobodysError, KeyboardInterrupt, SystemExit])
def test_a_file_whose_writing_fails_is_not_there_and_nothing_else_is(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), atomic_path(tmp_path / "new" / "file.csv") as partial:  # noqa: PT012
        partial.write_text("half")
        raise error
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_whose_writing_fails_keeps_what_it_held(tmp_path: Path) -> None:
    write_text(tmp_path / "file.csv", "earlier")
    with pytest.raises(OfNobodysError), atomic_path(tmp_path / "file.csv") as partial:  # noqa: PT012
        partial.write_text("half")
        assert (tmp_path / "file.csv").read_text() == "earlier"  # until the block ends, nothing has changed
        raise OfNobodysError
    assert (tmp_path / "file.csv").read_text() == "earlier"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_killed_process_leaves_no_half_file_under_the_final_name(tmp_path: Path) -> None:
    """SIGKILL runs no clean-up at all, so the half file must never have had the name."""
    (tmp_path / "old.csv").write_text("earlier")
    code = (
        "import os, signal, sys\nfrom contextlib import ExitStack\nfrom pathlib import Path\n"
        "from helpers.files import atomic_path\n"
        "with ExitStack() as stack:\n"
        "    for name in ('old.csv', 'new.csv'):\n"
        "        stack.enter_context(atomic_path(Path(sys.argv[1]) / name)).write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "old.csv").read_text() == "earlier"
    assert not (tmp_path / "new.csv").exists()


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_and_folders_are_as_readable_as_any_other_of_the_user(tmp_path: Path) -> None:
    """Temporary files are their owner's alone; a report in a shared folder must not stay so."""
    write_bytes(tmp_path / "file", b"whole")
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "inside").write_text("whole")
        (partial / "inside").chmod(0o600)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "folder", "folder/inside")]
    assert modes == [0o640, 0o750, 0o640]


def test_line_ends_are_written_as_they_are(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "a\r\nb\rc\n")
    assert (tmp_path / "file").read_bytes() == b"a\r\nb\rc\n"


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("old")
    with atomic_folder(folder) as partial:
        (partial / "new").write_text("new")
        assert [file.name for file in folder.iterdir()] == ["old"]
    assert [file.name for file in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_whose_writing_fails_stays_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(OfNobodysError), atomic_folder(folder) as partial:  # noqa: PT012
        (partial / "new").write_text("half")
        raise OfNobodysError
    assert [file.name for file in folder.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# -- the run as a whole


@pytest.fixture
def parameters(tmp_path: Path) -> Parameters:
    """Parameters of a run in a folder of its own; the checkpoint is as much of one as a run folder looks at."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Parameters(checkpoint=str(tmp_path / "model"), input="random", run_dir=str(tmp_path / "runs" / "one"))


def other(parameters: Parameters, **changes: object) -> Parameters:
    """The same parameters in another run folder beside, but for ``changes``."""
    return dataclasses.replace(parameters, **({"run_dir": f"{parameters.run_dir}-other"} | changes))


def statistics(value: float) -> dict[str, torch.Tensor]:
    return {"mass": torch.full((2, 3), value)}


def capture(parameters: Parameters, digest: str = "d1", value: float = 1.0) -> Run:
    """Do what notebook 01 does."""
    run = Run.open_step(parameters, FIRST)
    run.capture_once(digest, ["a", "b", "c"], lambda: statistics(value))
    run.write_text("01_capture_attention.html", "page")
    run.update(checkpoint={"name": "model"}, tensors=[], input={}, shapes={"attention_mass": [2, 3]})
    run.finish_step()
    return run


def score(parameters: Parameters, text: str = "scores") -> Run:
    """Do what notebook 02 does."""
    run = Run.open_step(parameters, SECOND)
    run.write_text("scores.csv", text)
    run.finish_step()
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_run_is_running_and_says_what_it_runs_on(parameters: Parameters) -> None:
    run = Run.of(parameters)
    run.begin(parameters, [FIRST, SECOND])
    manifest = run.manifest
    assert manifest["status"] == "running"
    assert manifest["error"] is None
    assert manifest["parameters"] == parameters.portable()
    assert manifest["steps"] == {FIRST: {"status": "pending"}, SECOND: {"status": "pending"}}
    environment = manifest["environment"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["versions"]["torch"] == torch.__version__
    assert {"transformers", "safetensors", "numpy", "pandas", "matplotlib", "papermill"} <= environment[
        "versions"
    ].keys()
    assert environment["threads"] == torch.get_num_threads()
    assert environment["code"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", environment["code"])


def test_a_run_is_complete_only_when_all_its_steps_are(parameters: Parameters) -> None:
    run = Run.of(parameters)
    run.begin(parameters, [FIRST, SECOND])
    run.start_step(FIRST)
    assert run.manifest["steps"][FIRST]["status"] == "running"
    run.finish_step()
    assert run.manifest["status"] == "running"
    run.start_step(SECOND)
    run.finish_step()
    assert run.manifest["status"] == "complete"


def test_a_finished_step_says_how_long_it_took_and_what_memory(parameters: Parameters) -> None:
    run = Run.of(parameters)
    run.begin(parameters, [FIRST])
    run.start_step(FIRST)
    time.sleep(0.1)
    run.finish_step()
    step = run.manifest["steps"][FIRST]
    assert 0.1 <= step["seconds"] < 10
    now = psutil.Process().memory_info().rss
    assert 0.5 * now < step["peak_memory_bytes"] < 100 * now


def test_peak_memory_is_this_process_own() -> None:
    """A block that was freed counts; what the process never held doesn't, whatever its parent did."""
    before = peak_memory_bytes()
    block = bytearray(os.urandom(1)) * (200 * 2**20 + max(0, before - psutil.Process().memory_info().rss))
    size = len(block)
    del block
    assert 190 * 2**20 < peak_memory_bytes() - before < size + 50 * 2**20


def test_a_new_start_removes_the_run_s_own_files_and_no_others(parameters: Parameters) -> None:
    run = capture(parameters)
    score(parameters)
    (run.folder / "notes.txt").write_text("mine")
    run.begin(parameters, [FIRST, SECOND])
    assert {path.name for path in run.folder.iterdir()} == {"manifest.json", "notes.txt"}
    assert "capture" not in run.manifest


def test_a_new_start_of_a_later_step_keeps_what_the_earlier_ones_made(parameters: Parameters) -> None:
    run = capture(parameters)
    score(parameters)
    run.begin(parameters, [SECOND])
    assert {path.name for path in run.folder.iterdir()} == {"manifest.json", "01_capture_attention.html"}
    assert run.manifest["capture"]["digest"] == "d1"
    assert run.manifest["steps"] == {FIRST: run.manifest["steps"][FIRST], SECOND: {"status": "pending"}}
    assert run.manifest["steps"][FIRST]["status"] == "complete"


@pytest.mark.parametrize("name", ["thesis.tex", ".hidden", "manifest.txt"])
def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(parameters: Parameters, name: str) -> None:
    folder = Path(parameters.run_dir)
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    for start in (lambda: Run.of(parameters).begin(parameters, [FIRST]), lambda: Run.open_step(parameters, FIRST)):
        with pytest.raises(InputError, match=r"run_dir 'one' is not a run folder, and not empty"):
            start()
    assert contents(folder) == {name: b"mine"}


def test_a_file_in_the_place_of_a_run_folder_is_refused_and_left_alone(parameters: Parameters) -> None:
    Path(parameters.run_dir).parent.mkdir()
    Path(parameters.run_dir).write_text("mine")
    with pytest.raises(InputError, match="is a file, not a folder"):
        Run.of(parameters).begin(parameters, [FIRST])
    assert Path(parameters.run_dir).read_text() == "mine"


@pytest.mark.parametrize("folder", ["/dev/null", "/tmp/../dev/null", "/proc/no-such"])
def test_a_place_where_no_folder_can_be_is_refused_by_name(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"run_dir={folder}"]) == 1
    assert re.match(r"Error: run_dir '(null|no-such)' .*: name another one\.\n", capsys.readouterr().err)


def test_an_empty_folder_may_become_a_run_s(parameters: Parameters) -> None:
    Path(parameters.run_dir).mkdir(parents=True)
    assert capture(parameters).manifest["status"] == "complete"


@pytest.mark.parametrize("text", ["", "{", "[]", '"run"', "\xff"])
def test_a_broken_manifest_is_refused_by_name(parameters: Parameters, text: str) -> None:
    folder = Path(parameters.run_dir)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"manifest\.json of one "):
        Run.of(parameters).begin(parameters, [FIRST])
    assert (folder / "manifest.json").read_bytes() == text.encode("latin-1")


# -- a start that is refused


def test_a_full_disk_still_leaves_a_true_status(parameters: Parameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for a second file, which is how everything else is written."""
    run = Run.of(parameters)
    run.begin(parameters, [FIRST])

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("helpers.runs.write_text", full)
    run.stop("failed", "x")
    assert (run.manifest["status"], run.manifest["error"]) == ("failed", "x")
    run.stop("failed", "")  # shorter than what it overwrites
    assert run.manifest["error"] == ""


def test_a_capture_that_cannot_be_written_is_said_and_not_left(
    parameters: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open_step(parameters, FIRST)

    def full(statistics: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("helpers.runs.save_file", full)
    with pytest.raises(InputError, match=r"The capture can't be written to captures: I/O error: No space left"):
        run.capture_once("d", None, lambda: statistics(1.0))
    assert list((run.folder.parent / "captures").iterdir()) == []


def test_a_refused_start_is_recorded_where_no_run_was(parameters: Parameters) -> None:
    run = Run.of(parameters)
    run.refuse(parameters.portable(), "no such layer")
    assert run.manifest == {"status": "failed", "parameters": parameters.portable(), "error": "no such layer"}


def test_a_refused_start_is_recorded_in_an_empty_folder_too(parameters: Parameters) -> None:
    """An empty folder is one that a start would have taken: its manifest says what became of it."""
    Path(parameters.run_dir).mkdir(parents=True)
    run = Run.of(parameters)
    run.refuse(parameters.portable(), "no such layer")
    assert run.manifest["status"] == "failed"


def test_a_refused_start_leaves_a_complete_run_untouched(parameters: Parameters) -> None:
    run = capture(parameters)
    before = contents(run.folder)
    run.refuse(other(parameters, layer=99).portable(), "no such layer")
    assert contents(run.folder) == before


def test_a_refused_start_does_not_spoil_what_an_interrupted_run_has(parameters: Parameters) -> None:
    """A typing slip must not cost a capture, nor make it pass for one of other parameters."""
    run = capture(parameters)
    run.start_step(SECOND)
    run.stop("interrupted", "interrupted by the user")
    refused = other(parameters, run_dir=parameters.run_dir, layer=1)
    run.refuse(refused.portable(), "not enough memory just now")
    assert run.manifest["status"] == "failed"
    with pytest.raises(InputError, match="another layer"):
        Run.open_step(refused, SECOND)
    assert score(parameters).load_capture()[0]["mass"].tolist() == statistics(1.0)["mass"].tolist()


# -- steps that need an earlier one


@pytest.mark.parametrize(("step", "needs", "maker"), [(SECOND, "capture", FIRST), (THIRD, "scores.csv", SECOND)])
def test_a_step_without_what_it_needs_says_which_notebook_or_command_makes_it(
    parameters: Parameters, step: str, needs: str, maker: str
) -> None:
    with pytest.raises(InputError) as caught:
        Run.open_step(parameters, step)
    for words in (f"has no {needs}", f"notebooks/{maker}.ipynb", "python -m helpers report"):
        assert words in str(caught.value)
    assert not Path(parameters.run_dir).exists()  # no run that seems to be running


def test_a_run_whose_capture_was_deleted_says_how_to_make_it_again(parameters: Parameters) -> None:
    run = capture(parameters)
    shutil.rmtree(run.folder.parent / "captures")
    with pytest.raises(InputError, match=FIRST):
        Run.open_step(parameters, SECOND)


def test_a_new_budget_takes_scores_and_capture_from_the_run_beside(parameters: Parameters) -> None:
    capture(parameters)
    score(parameters, "the scores")
    run = Run.open_step(other(parameters, budget=1, n_sink=0, n_recent=0), THIRD)
    assert (run.folder / "scores.csv").read_text() == "the scores"
    assert run.manifest["capture"]["digest"] == "d1"
    assert run.manifest["shapes"] == {"attention_mass": [2, 3]}
    assert run.load_capture()[0]["mass"].tolist() == statistics(1.0)["mass"].tolist()
    assert run.manifest["parameters"]["budget"] == 1


def test_a_new_budget_takes_the_capture_alone_where_scores_are_not_made_yet(parameters: Parameters) -> None:
    capture(parameters)
    run = score(other(parameters, budget=1), "from the capture of the run beside")
    assert run.load_capture()[1] == ["a", "b", "c"]
    assert run.manifest["status"] == "complete"


CAPTURE_CHANGES = [
    {"seq_len": 128}, {"layer": 1}, {"continuation": 0}, {"seed": 1}, {"embedding_std": 0.5}, {"dtype": "float32"},
    {"input": "text"}, {"device": "cpu"},
]  # fmt: skip


@pytest.mark.parametrize("change", CAPTURE_CHANGES, ids=str)
def test_another_capture_s_scores_are_never_taken(parameters: Parameters, change: dict[str, object]) -> None:
    capture(parameters)
    score(parameters)
    for step, needs in ((SECOND, "capture"), (THIRD, "scores.csv")):
        with pytest.raises(InputError, match=f"has no {needs} yet"):
            Run.open_step(other(parameters, **change), step)


@pytest.mark.parametrize("change", CAPTURE_CHANGES, ids=str)
def test_a_later_step_is_refused_in_the_folder_of_another_capture(
    parameters: Parameters, change: dict[str, object]
) -> None:
    run = capture(parameters)
    score(parameters)
    before = contents(run.folder)
    for step in (SECOND, THIRD):
        with pytest.raises(InputError, match=f"one is a run with another {next(iter(change))}"):
            Run.open_step(other(parameters, run_dir=parameters.run_dir, **change), step)
    assert contents(run.folder) == before


def test_scores_of_another_checkpoint_of_the_same_folder_name_are_never_taken(
    parameters: Parameters, tmp_path: Path
) -> None:
    """Manifests hold a folder's last name only, and two downloads of one model may well share it."""
    capture(parameters)
    score(parameters)
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    (tmp_path / "elsewhere" / "model" / "config.json").write_text('{"another": "model"}')
    with pytest.raises(InputError, match=r"has no scores\.csv yet"):
        Run.open_step(other(parameters, checkpoint=str(tmp_path / "elsewhere/model")), THIRD)


def test_scores_of_a_text_that_was_changed_since_are_never_taken(parameters: Parameters, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("before")
    mine = dataclasses.replace(parameters, input="text", text=str(text))
    capture(mine)
    score(mine)
    text.write_text("after")
    with pytest.raises(InputError, match=r"has no scores\.csv yet"):
        Run.open_step(other(mine, budget=1), THIRD)


def test_scores_of_a_step_that_did_not_finish_are_never_taken(parameters: Parameters) -> None:
    capture(parameters)
    run = Run.open_step(parameters, SECOND)
    run.write_text("scores.csv", "of a notebook that then failed")
    run.stop("failed", "it failed")
    with pytest.raises(InputError, match=r"has no scores\.csv yet"):
        Run.open_step(other(parameters, budget=1), THIRD)


# -- captures


def test_a_capture_is_computed_once_and_shared(parameters: Parameters) -> None:
    calls = []

    def compute() -> dict[str, torch.Tensor]:
        calls.append(1)
        return statistics(0.1)

    first = Run.open_step(parameters, FIRST)
    computed, seconds = first.capture_once("d1", None, compute)
    second = Run.open_step(other(parameters, budget=1), FIRST)
    stored, no_seconds = second.capture_once("d1", None, compute)
    assert calls == [1]
    assert seconds is not None
    assert no_seconds is None
    assert torch.equal(computed["mass"], stored["mass"])
    assert torch.equal(stored["mass"], statistics(0.1)["mass"])
    assert [path.name for path in (first.folder.parent / "captures").iterdir()] == ["d1.safetensors"]
    assert second.load_capture()[1] is None


def test_another_digest_is_another_capture(parameters: Parameters) -> None:
    capture(parameters, "d1", 1.0)
    assert capture(other(parameters, seed=1), "d2", 2.0).load_capture()[0]["mass"].unique().tolist() == [2.0]
    assert Run.of(parameters).load_capture()[0]["mass"].unique().tolist() == [1.0]


def test_tokens_of_any_text_survive_in_a_capture(parameters: Parameters) -> None:
    tokens = ["", "\r", "\x00", '"', "é", "𝒳", "\ufffd"]
    run = Run.open_step(parameters, FIRST)
    run.capture_once("d1", tokens, lambda: statistics(1.0))
    assert run.load_capture()[1] == tokens


def test_a_capture_that_fails_leaves_no_file(parameters: Parameters) -> None:
    run = Run.open_step(parameters, FIRST)
    with pytest.raises(OfNobodysError):
        run.capture_once("d1", None, lambda: (_ for _ in ()).throw(OfNobodysError()))
    assert not (run.folder.parent / "captures").exists()
    assert "capture" not in run.manifest


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:5], lambda _: b"", lambda b: b"{" * len(b)])
def test_a_damaged_capture_is_computed_again_and_never_read(
    parameters: Parameters, damage: Callable[[bytes], bytes]
) -> None:
    run = capture(parameters, "d1", 1.0)
    path = run.folder.parent / "captures" / "d1.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=rf"captures/d1\.safetensors is damaged: run notebooks/{FIRST}\.ipynb again"):
        run.load_capture()
    again = capture(parameters, "d1", 2.0)
    assert again.load_capture()[0]["mass"].unique().tolist() == [2.0]


# -- two at once


def test_a_run_that_another_process_runs_is_refused_and_left_alone(
    words: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock belongs to an open file, so a second one in this process stands for another process."""
    run = Run.of(Parameters.check(words))
    with run.locked():
        run.begin(Parameters.check(words), [FIRST])
        before = (run.folder / "manifest.json").read_bytes()
        for wrong in ([], ["layer=99"], ["layr=1"]):
            assert main(["report", *(f"{name}={value}" for name, value in words.items()), *wrong]) == 1
            said = capsys.readouterr().err
            assert "Unknown parameter" in said if "layr=1" in wrong else "one is being run by another process" in said
        assert (run.folder / "manifest.json").read_bytes() == before
    with run.locked():
        pass


def test_a_lock_leaves_nothing_behind_where_nothing_was_written(parameters: Parameters) -> None:
    with Run.of(parameters).locked():
        assert Path(parameters.run_dir).is_dir()
    assert not Path(parameters.run_dir).exists()


# -- the status of a whole report


@pytest.fixture
def words(mla_checkpoint: Path, tmp_path: Path) -> dict[str, object]:
    return {
        "checkpoint": str(mla_checkpoint), "seq_len": 16, "continuation": 0, "n_recent": 4, "budget": 4,
        "run_dir": str(tmp_path / "runs" / "one"),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The command line sets handlers, which must not outlive their test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_says_running_while_a_notebook_runs_and_interrupted_after_ctrl_c(
    words: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, seen = Run(Path(str(words["run_dir"]))), []

    def interrupted(*_: object, **__: object) -> None:
        seen.append(run.manifest["status"])
        raise KeyboardInterrupt

    monkeypatch.setattr(papermill, "execute_notebook", interrupted)
    assert main(["report", *(f"{name}={value}" for name, value in words.items())]) == 130
    assert seen == ["running"]
    assert run.manifest["status"] == "interrupted"
    assert "Report:" not in capsys.readouterr().out


def test_a_run_whose_notebook_fails_says_failed_and_why_without_a_path(
    words: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(f"no space left: {tmp_path}/runs/one/scores.csv")

    monkeypatch.setattr(papermill, "execute_notebook", fail)
    with pytest.raises(OSError, match="no space left"):
        run_report(Parameters.check(words), [FIRST])
    manifest = Run(Path(str(words["run_dir"]))).manifest
    assert manifest["status"] == "failed"
    assert manifest["error"] == "no space left: scores.csv"


def test_a_kernel_that_dies_fails_the_run_and_names_memory(
    words: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise DeadKernelError("Kernel died")

    monkeypatch.setattr(papermill, "execute_notebook", die)
    with pytest.raises(NotebookError, match=f"The kernel of {FIRST} died, most likely for lack of memory"):
        run_report(Parameters.check(words), [FIRST])
    manifest = Run(Path(str(words["run_dir"]))).manifest
    assert (manifest["status"], "lower seq_len" in manifest["error"]) == ("failed", True)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda ending: ending.name)
def test_a_report_that_is_told_to_stop_ends_its_kernel_and_says_interrupted(
    ending: signal.Signals, words: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, a batch system that stops the job, a terminal that closes: each while a real kernel works."""
    kernels: list[psutil.Process] = []
    ended = threading.Event()

    def stop_when_a_kernel_works() -> None:
        deadline = time.monotonic() + 60
        while not kernels and time.monotonic() < deadline:
            time.sleep(0.05)
            kernels.extend(
                child for child in psutil.Process().children() if "ipykernel_launcher" in " ".join(child.cmdline())
            )
        if not ended.wait(3):  # by then it is busy importing
            os.kill(os.getpid(), ending)

    stopper = threading.Thread(target=stop_when_a_kernel_works)
    stopper.start()
    status = main(["report", *(f"{name}={value}" for name, value in words.items())])
    ended.set()
    stopper.join()
    assert status == 130
    assert len(kernels) == 1
    assert psutil.wait_procs(kernels, timeout=3)[1] == []
    folder = Path(str(words["run_dir"]))
    assert {path.name for path in folder.iterdir()} == {"manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["status"], manifest["error"]) == ("interrupted", "interrupted by the user")
    said = capfd.readouterr().err
    assert said.endswith("\nInterrupted.\n")
    assert not re.search("Traceback|Error|Exception", said)


def test_a_kernel_that_has_ended_already_is_no_obstacle_to_an_interrupt() -> None:
    """A process that ended and wasn't waited for has no command line to ask for."""
    with subprocess.Popen(["true"]) as ended:
        time.sleep(0.5)
        assert psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE
        helpers.reports._end_kernels()


@pytest.mark.parametrize(
    ("name", "said"),
    [("MemoryError", ""), ("OutOfMemoryError", "CUDA out of memory"), ("RuntimeError", "can't allocate memory: you")],
)
def test_a_notebook_without_memory_says_so_in_one_sentence(
    name: str, said: str, words: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PapermillExecutionError(0, 1, "source", name, said, ["a long", "traceback"])

    monkeypatch.setattr(papermill, "execute_notebook", fail)
    assert main(["report", *(f"{word}={value}" for word, value in words.items())]) == 1
    assert capsys.readouterr().err == f"Error: {FIRST} ran out of memory: lower seq_len, or free memory.\n"


@pytest.mark.parametrize("name", ["checkpoint", "text", "run_dir"])
def test_a_name_that_is_no_text_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Python hands on bytes that are not UTF-8 as lone surrogates, which no artefact could hold."""
    assert main(["report", f"{name}=caf\udce9"]) == 1
    assert "The name 'caf\\udce9' is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoint", "text", "run_dir"])
def test_the_home_of_nobody_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{name}=~no-such-user/x"]) == 1
    assert "'~no-such-user/x' names the home of a user that isn't here" in capsys.readouterr().err


def test_the_root_of_all_folders_is_no_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run_dir=/"]) == 1
    assert "is not a run folder, and not empty: name another one" in capsys.readouterr().err
    assert not Path("/manifest.json").exists()
