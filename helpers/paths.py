"""Where things are: one project root, so that notebooks and commands work from any folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from helpers.errors import InputError

# number on the command line -> file name without .ipynb
NOTEBOOKS = {
    "01": "01_capture_attention",
    "02": "02_score_tokens",
    "03": "03_evict_h2o",
    "04": "04_compare_policies",
}
DEFAULT_NOTEBOOKS = "01,02,03"  # the demo; comparing policies takes many texts


def project_root() -> Path:
    """Return the folder that holds ``notebooks/`` and ``helpers/``.

    Raises:
        InputError: the package was installed without its project (not with ``pip install -e .``).
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / "notebooks").is_dir():
        raise InputError(
            f"The notebooks are not beside the installed package ({root}): install the project with `pip install -e .`."
        )
    return root


def resolve(path: str) -> Path:
    """Return a path to write to as an absolute path; a relative one counts from the project root."""
    return (project_root() / _expand(path)).resolve()


def locate(path: str) -> Path:
    """Return a path to read from as an absolute path; a relative one is looked for here, then in the project root."""
    here = _expand(path)
    return here.resolve() if here.exists() else resolve(path)


def _expand(path: str) -> Path:
    if "\0" in path or any("\ud800" <= character <= "\udfff" for character in path):
        raise InputError(f"The name {path!a} is not UTF-8 text, and artefacts couldn't hold it: rename it.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"'{path}' names the home of a user that isn't here: write the folder out.") from None


def portable(path: Path) -> str:
    """Return ``path`` as it may stand in an artefact: relative inside the project, else only its last part."""
    root = project_root()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def scrub(text: str, paths: Iterable[Path]) -> str:
    """Take absolute paths out of ``text``: those of ``paths``, the project, the home and the temporary folder.

    What lies in one of their folders keeps its name, so that a message still says which file it means.
    """
    folders = {path.parent for path in paths} | {project_root(), Path.home(), Path(tempfile.gettempdir()).resolve()}
    for folder in sorted(map(str, folders - {Path("/")}), key=len, reverse=True):
        # not inside an HTML tag (</t> of a folder /t), nor the beginning of a longer name
        found = rf"(?<!<){re.escape(folder)}"
        text = re.sub(rf"{found}(?!\w|/)", Path(folder).name.replace("\\", r"\\"), re.sub(f"{found}/", "", text))
    return text


def scrub_message(message: str, paths: Iterable[Path] = ()) -> str:
    """Like :func:`scrub`, for a sentence: whatever looks like an absolute path keeps its last part only."""
    return scrub(re.sub(r"(?<![\w.:/~-])/(?:[^/\s'\"]+/)+", "", message), paths)
