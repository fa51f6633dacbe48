"""JSON of files that came from elsewhere, where what Python's reader lets pass would make a wrong file look right."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: it isn't one, or is ambiguous or can't be written again: a name given twice, NaN or infinity, half
            of a surrogate pair, or nested too deeply.
    """
    text = content.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if re.search(r"\\u[dD][89a-fA-F]", text):  # which else can't occur: UTF-8 holds no surrogates
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair, which is no text") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it gives {max(names, key=names.count)!r} twice")
    return value


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}, which is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it holds {text}, which is too large a number")
    return number
