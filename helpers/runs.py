"""Run folders: what a run was, how far it came, and where its artefacts are.

A run folder holds ``manifest.json``, the tables, ``figures/`` and the reports. Captures lie beside the run folders in
``captures/``, under the digest of everything that determines them, so that runs which differ only in budget share one.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from helpers.errors import InputError
from helpers.files import atomic_path, write_text
from helpers.parameters import CAPTURE_PARAMETERS, Parameters
from helpers.paths import project_root, resolve

MANIFEST = "manifest.json"
VERSIONS = ("transformers", "safetensors", "numpy", "pandas", "matplotlib", "papermill")

FIRST = "01_capture_attention"
REPORT = "report"  # the last step of a run from the command line: its front page
# Which artefact a notebook needs, and which notebook makes it.
NEEDS = {"02_score_tokens": "capture", "03_evict_h2o": "scores.csv", "04_compare_policies": "capture"}
MADE_BY = {
    "capture": FIRST,
    "scores.csv": "02_score_tokens",
}
# What notebook 01 says of a capture in the manifest; it goes where the capture goes.
ADOPTED = ("checkpoint", "tensors", "input", "shapes", "capture")


class Run:
    """One run folder and its manifest, which is read and written whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = ""  # the notebook whose artefacts are being written
        self.started = 0.0  # when it was

    @classmethod
    def of(cls, parameters: Parameters) -> Run:
        """The run that these parameters name: ``run_dir``, or a folder of ``results/`` named after them."""
        return cls(resolve(parameters.run_dir or f"results/{parameters.run_id}"))

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except ValueError as error:
            raise InputError(
                f"{MANIFEST} of {self.name} is not valid JSON ({error}): remove that run folder."
            ) from None
        if not isinstance(manifest, dict):
            raise InputError(f"{MANIFEST} of {self.name} is no run's manifest: name another run_dir.")
        return manifest

    def update(self, **sections: Any) -> None:
        """Set top-level sections of the manifest."""
        write_text(self.folder / MANIFEST, _json(self.manifest | sections))

    # -- the run as a whole

    def begin(self, parameters: Parameters, steps: Sequence[str]) -> None:
        """Start the run, or these ``steps`` of it again, with status ``running``.

        What an earlier start left of these steps is removed; all of it is if the capture's parameters changed.

        Raises:
            InputError: the folder holds something else than a run.
        """
        self.check_folder()
        earlier = self.manifest
        if FIRST in steps or self._differences(parameters):
            earlier = {}
        kept = {step: state for step, state in earlier.get("steps", {}).items() if step not in steps}
        artefacts = self.manifest.get("artefacts", {})
        for artefact, step in artefacts.items():
            if step not in kept:
                (self.folder / artefact).unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = earlier | {
            "status": "running",
            "parameters": parameters.portable(),
            "fingerprint": parameters.fingerprint(),
            "steps": kept | {step: {"status": "pending"} for step in steps},
            "artefacts": {artefact: step for artefact, step in artefacts.items() if step in kept},
            "environment": _environment(),
            "error": None,
        }
        write_text(self.folder / MANIFEST, _json(manifest))

    def check_folder(self) -> None:
        """Refuse a folder with files of somebody else's in it, before anything is written there."""
        if not self._above.is_dir():
            raise InputError(f"run_dir '{self.name}' lies below {self._above.name}, which is a file: name another one.")
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"run_dir '{self.name}' is a file, not a folder: name another one.")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self.manifest:
            raise InputError(f"run_dir '{self.name}' is not a run folder, and not empty: name another one.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder to this process; it is made if need be.

        Raises:
            InputError: another process runs in it, or it can't be made.
        """
        self.check_folder()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"run_dir '{self.name}' can't be used ({error.strerror}): name another one.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(
                f"{self.name} is being run by another process: wait for it, or name another run_dir."
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            os.close(handle)  # which unlocks it
            with suppress(OSError):
                self.folder.rmdir()  # where nothing was written

    def stop(self, status: str, error: str) -> None:
        """Record that the run ended early: ``failed`` or ``interrupted``, with the reason."""
        steps = {
            step: state | ({"status": status} if state["status"] == "running" else {})
            for step, state in self.manifest["steps"].items()
        }
        ended = {"status": status, "error": error, "steps": steps}
        try:
            self.update(**ended)
        except OSError:  # a full disk takes no second file, but the first can be written over
            text = _json(self.manifest | ended)
            with (self.folder / MANIFEST).open("r+", encoding="utf-8") as file:
                file.write(text)
                file.truncate()

    def refuse(self, parameters: dict[str, Any], error: str) -> None:
        """Record a start that was refused as ``failed``; a complete run is left alone."""
        manifest = self.manifest
        if manifest.get("status") == "complete":
            return
        # where an earlier start left results, the parameters stay theirs
        self.update(status="failed", error=error, **({} if "steps" in manifest else {"parameters": parameters}))

    # -- one step of it

    @classmethod
    def open_step(cls, parameters: Parameters, step: str) -> Run:
        """Open the run for one notebook, which becomes its running step.

        The artefact that the notebook needs may come from another run of the same capture.

        Raises:
            InputError: as :meth:`check_needs`.
        """
        run = cls.of(parameters)
        source = run.check_needs(parameters, step)
        if run._differences(parameters) or not run.manifest.get("steps"):
            run.begin(parameters, [step])
        run.start_step(step)
        if source:
            run._adopt(NEEDS[step], source)
        run.update(parameters=parameters.portable())
        return run

    def check_needs(self, parameters: Parameters, step: str) -> Run | None:
        """Return the run to take from what ``step`` needs; None where it needs nothing, or has it here.

        Raises:
            InputError: it is nowhere (says which notebook or command makes it), or this folder holds a run of another
                capture.
        """
        if step not in NEEDS:
            return None
        differences = self._differences(parameters)
        if self.manifest.get("steps") and differences:
            raise InputError(
                f"{self.name} is a run with another {differences[0]}: leave run_dir empty, or name another one."
            )
        return self._find(NEEDS[step], parameters)

    def start_step(self, step: str) -> None:
        self.step, self.started = step, time.time()
        steps = self.manifest["steps"] | {step: {"status": "running", "started": self.started}}
        self.update(status="running", steps=steps, error=None)

    def finish_step(self) -> None:
        """Mark the step complete, with its wall time and peak memory; the run too, if nothing of it is left to do."""
        steps = self.manifest["steps"]
        steps[self.step] = {
            "status": "complete",
            "seconds": round(time.time() - self.started, 2),
            "peak_memory_bytes": peak_memory_bytes(),
        }
        if torch.cuda.is_available():
            steps[self.step]["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
        complete = all(state["status"] == "complete" for state in steps.values())
        self.update(steps=steps, status="complete" if complete else "running")

    # -- artefacts

    def path(self, artefact: str) -> Path:
        """Return the path of an artefact, and record whose it is, so that the next start can remove it."""
        self.update(artefacts=self.manifest["artefacts"] | {artefact: self.step})
        return self.folder / artefact

    def write_text(self, artefact: str, text: str) -> None:
        write_text(self.path(artefact), text)

    def write_json(self, artefact: str, value: Any) -> None:
        self.write_text(artefact, _json(value))

    def capture_once(
        self, digest: str, tokens: list[str] | None, compute: Callable[[], dict[str, torch.Tensor]]
    ) -> tuple[dict[str, torch.Tensor], float | None]:
        """Make ``digest`` the run's capture, as :meth:`stored_capture` gives it.

        Returns the statistics and the seconds they took, None if they were stored.
        """
        started = time.perf_counter()
        statistics, made = self.stored_capture(digest, tokens, compute)
        seconds = time.perf_counter() - started if made else None
        self.update(capture={"digest": digest, "seconds": seconds and round(seconds, 3)})
        return statistics, seconds

    def stored_capture(
        self, digest: str, tokens: list[str] | None, compute: Callable[[], dict[str, torch.Tensor]]
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """Return a capture, and whether it was made now; ``compute`` runs only where no run before stored it.

        ``compute`` gives the statistics by name, each [H, P]; ``tokens`` are the prompt's texts, None for random input.
        """
        path = self._captures / f"{digest}.safetensors"
        made = not _is_whole(path)
        if made:
            statistics = compute()
            with atomic_path(path) as partial:
                try:
                    save_file(statistics, partial, metadata={"tokens": json.dumps(tokens)})
                except SafetensorError as error:  # a full disk, most likely
                    raise InputError(f"The capture can't be written to {path.parent.name}: {error}") from None
        return _read_capture(path)[0], made

    def load_capture(self) -> tuple[dict[str, torch.Tensor], list[str] | None]:
        """Return the run's capture: the statistics by name, and the tokens' texts.

        Raises:
            InputError: the file is damaged.
        """
        path = self._captures / f"{self.manifest['capture']['digest']}.safetensors"
        if not _is_whole(path):
            raise InputError(f"{path.parent.name}/{path.name} is damaged: run notebooks/{FIRST}.ipynb again.")
        return _read_capture(path)

    @property
    def _above(self) -> Path:
        """The nearest thing above the run folder that exists."""
        return next((folder for folder in self.folder.parents if folder.exists()), self.folder)

    @property
    def _captures(self) -> Path:
        return self.folder.parent / "captures"

    def _differences(self, parameters: Parameters) -> list[str]:
        """Capture parameters in which this folder's run differs from ``parameters``, or whose files do."""
        manifest, ours = self.manifest, parameters.portable()
        names = [name for name in CAPTURE_PARAMETERS if manifest.get("parameters", {}).get(name) != ours[name]]
        if not names and manifest.get("fingerprint") != parameters.fingerprint():
            names = ["state of the checkpoint or text"]
        return names

    def _find(self, artefact: str, parameters: Parameters) -> Run | None:
        """Return the run beside this one to take ``artefact`` from: one of the same capture. None if it is here."""
        if self._has(artefact):
            return None
        for manifest in sorted(self.folder.parent.glob(f"*/{MANIFEST}")):
            other = Run(manifest.parent)
            done = other.manifest.get("steps", {}).get(MADE_BY[artefact], {}).get("status") == "complete"
            if done and not other._differences(parameters) and other._has(artefact):
                return other
        raise InputError(
            f"{self.name} has no {artefact} yet: run notebooks/{MADE_BY[artefact]}.ipynb with the same parameters "
            "first, or `python -m helpers report` for all notebooks."
        )

    def _has(self, artefact: str) -> bool:
        if artefact != "capture":
            return (self.folder / artefact).exists()
        digest = self.manifest.get("capture", {}).get("digest")
        return digest is not None and (self._captures / f"{digest}.safetensors").exists()

    def _adopt(self, artefact: str, other: Run) -> None:
        """Take the artefact from another run of the same capture, so that a new budget needs no new pass."""
        if artefact != "capture":
            with atomic_path(self.path(artefact)) as partial:
                shutil.copyfile(other.folder / artefact, partial)
        self.update(**{name: other.manifest[name] for name in ADOPTED})


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _read_capture(path: Path) -> tuple[dict[str, torch.Tensor], list[str] | None]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in list(file.keys())}, json.loads(file.metadata()["tokens"])


def _is_whole(capture: Path) -> bool:
    """Whether a stored capture is there and can be read: its header tells the length that the file must have."""
    try:
        with safe_open(capture, framework="pt") as file:
            return "tokens" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def peak_memory_bytes() -> int:
    """Peak resident memory of this process. Linux's rusage would count what the parent had before it started this."""
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status.read_text(), flags=re.MULTILINE)
        return int(peak) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__} | {name: version(name) for name in VERSIONS},
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "code": _git_commit(),
    }


def _git_commit() -> str | None:
    """The commit of the code, marked ``-dirty`` when files differ from it; None outside a git checkout."""
    command = ["git", "-C", str(project_root()), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
