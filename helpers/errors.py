"""One exception for everything a person can put right: its text says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A parameter, file or tensor that the run can't go on with. The message is meant to be read by a person."""


class NotebookError(RuntimeError):
    """A notebook failed for a reason that its parameters don't explain; the message holds the cell's traceback."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the candidate nearest to ``name``, or ``""`` when none is near."""
    nearest = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""
