"""Text that every Python carries: the standard library's sources, and the language reference's topics.

Documents are split by name into training and held-out text, the same way on every machine, so that what a model was
trained on here is known to be unseen elsewhere. Other Python versions give slightly different documents.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 10  # one document in so many
# tables of characters, the topics again, and what the build machine wrote; tests are many, long and alike
LEFT_OUT = {"encodings", "pydoc_data", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
GENERATED = "_sysconfigdata"
TOPIC = "topic:"


@dataclass(frozen=True)
class Document:
    """One text: ``name`` is a module's (``json.decoder``), or a topic's (``topic:with``)."""

    name: str
    text: str

    @property
    def is_topic(self) -> bool:
        return self.name.startswith(TOPIC)

    @property
    def description(self) -> str:
        """What the text is, in words, for reports."""
        if self.is_topic:
            return f"the Python reference's topic '{self.name.removeprefix(TOPIC)}'"
        return f"the source of Python's module {self.name}"

    @property
    def held_out(self) -> bool:
        """Whether no model of this project was trained on it: decided by the name alone."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) % HELD_OUT == 0

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def documents() -> list[Document]:
    """All documents of the running Python, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [Document(TOPIC + name, text) for name, text in pydoc_data.topics.topics.items()]
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts[:-1]) and not path.name.startswith(GENERATED) and "config-" not in parts[0]:
            text = path.read_bytes().decode("utf-8", errors="replace")
            if text.strip():
                found.append(Document(".".join(parts), text))
    return sorted(found, key=lambda document: document.name)
