"""Files that are whole or not there: everything is written beside its place and renamed into it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.errors import InputError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; it becomes ``path`` when the block ends well, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Like :func:`atomic_path` for a whole folder; an earlier ``folder`` is replaced at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        for file in partial.iterdir():
            file.chmod(0o666 & ~_umask())  # some writers leave files that only their owner can read
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        # newline="" keeps "\r" inside a quoted token as it is
        partial.write_text(text, encoding="utf-8", newline="")


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_path(path) as partial:
        partial.write_bytes(data)


def refuse_lfs_pointer(path: Path, content: bytes) -> None:
    """Refuse what Git LFS leaves in a file's place where the file itself was not fetched (https://git-lfs.com/spec).

    ``content`` is the file's, or its first eight bytes.
    """
    if content.startswith(b"version "):
        raise InputError(
            f"{path.name} of {path.parent.name} is a Git LFS pointer, not the file itself: run `git lfs pull` in that "
            "folder."
        )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
