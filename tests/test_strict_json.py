"""The strict JSON reader: Python's own reader for good texts, a named fault where a text is ambiguous or no value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.strict_json import parse_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(values, st.booleans())
def test_whatever_python_writes_is_read_back(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', r"it gives 'a' twice"),
        (b'[{"x": {"a": 1, "a": 2}}]', r"it gives 'a' twice"),
        (b'{"\\u0061": 1, "a": 2}', r"it gives 'a' twice"),
        (b'{"a": NaN}', r"it holds NaN, which is no number"),
        (b"[Infinity]", r"it holds Infinity"),
        (b"[-Infinity]", r"it holds -Infinity"),
        (b"[1e999]", r"it holds 1e999, which is too large a number"),
        (b'["\\ud800"]', r"half of a surrogate pair"),
        (b'{"\\uDC00": 1}', r"half of a surrogate pair"),
        (b"[" * 100_000, r"nested too deeply"),
        (b'{"a":' * 100_000, r"nested too deeply"),
        (b"\xff{}", r"utf-8"),
        (b"\xef\xbb\xbf{}", r"BOM"),
        (b"", r"Expecting value"),
        (b"{} {}", r"Extra data"),
        (b"[" + b"9" * 5000 + b"]", r"4300"),
    ],
)
def test_a_text_that_could_mislead_is_refused_with_the_fault(content: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_json(content)


def test_a_whole_surrogate_pair_is_one_character() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
