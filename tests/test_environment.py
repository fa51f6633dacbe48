"""The two ways to install give one list of packages, and the package imports from anywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.paths import project_root

ROOT = project_root()


def requirements() -> dict[str, str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize(("name", "pinned"), requirements().items())
def test_the_pinned_version_is_installed(name: str, pinned: str) -> None:
    assert version(name).split("+")[0] == pinned


def test_conda_takes_the_same_list() -> None:
    text = (ROOT / "environment.yml").read_text()
    assert re.search(r"- python >=3\.11\n", text)
    assert "- -r requirements.txt\n" in text


def test_every_import_of_the_package_is_in_the_list() -> None:
    imported = set()
    for path in (ROOT / "helpers").glob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE))
    third_party = imported - set(sys.stdlib_module_names) - {"helpers", "triton"}  # torch's CUDA builds bring Triton
    names = {name.lower() for name in requirements()}
    assert {{"PIL": "pillow"}.get(name, name).lower() for name in third_party} <= names


def test_the_package_imports_from_any_folder(tmp_path: Path) -> None:
    code = "import helpers.parameters, helpers.paths; print(helpers.paths.project_root())"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == ROOT


def test_make_lists_its_targets() -> None:
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = ("report", "test", "lab", "bench", "checkpoint-kimi-shaped", "checkpoint-smollm2", "train-kimi-mini",
               "measure-kimi-mini")  # fmt: skip
    for target in targets:
        assert re.search(rf"^  {target} ", result.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("python", "remedy"),
    [
        ("import sys; sys.exit(1)", "Python 3.11 or newer is needed"),
        ("import sys; sys.exit('ensurepip' in sys.argv[2])", "apt install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_gets_one_sentence(tmp_path: Path, python: str, remedy: str) -> None:
    """An old Python fails the version check; one without venv fails the import; each run makes no .venv."""
    fake = tmp_path / "fake-python"
    fake.write_text(f"#!{sys.executable}\n{python}\n")
    fake.chmod(0o755)
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # not a child of make
    result = subprocess.run(
        ["make", "report", f"PYTHON={fake}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    (sentence,) = result.stdout.splitlines()
    assert remedy in sentence
    assert not (tmp_path / ".venv").exists()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose environment is made, and whose Python only prints the words it is given."""
    for name in ("Makefile", "requirements.txt", "requirements-test.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "jupyter"):
        fake = tmp_path / ".venv" / "bin" / name
        fake.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
        fake.chmod(0o755)
    for name in ("installed", "installed-tests"):
        (tmp_path / ".venv" / name).touch()
    return tmp_path


def make(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *words], cwd=project, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "value",
    [
        "doc (1).txt",
        "it's",
        "a&b",
        "a;b",
        "`id`",
        "$(HOME)",
        "$HOME",
        "a > b",
        '"',
        "\\",
        "*",
        "#",
        "é",
        "=",
        "a  b",
        "",
    ],
)
def test_make_hands_every_value_on_as_it_is(project: Path, value: str) -> None:
    result = make(project, "report", "CHECKPOINT=x", f"TEXT={value}", "layer=3")
    assert result.returncode == 0, result.stderr
    words = json.loads(result.stdout)
    assert words[:3] == ["-m", "helpers", "report"]
    assert sorted(words[3:]) == sorted(["CHECKPOINT=x", f"TEXT={value}", "layer=3"])


@pytest.mark.parametrize("target", ["test", "lab", "bench"])
def test_a_target_that_takes_no_parameters_says_so(project: Path, target: str) -> None:
    result = make(project, target, "LAYER=3")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"make {target} takes no parameters, and got LAYER" in result.stderr
    assert make(project, target).returncode == 0


def test_code_and_notebooks_are_formatted_linted_and_typed() -> None:
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
