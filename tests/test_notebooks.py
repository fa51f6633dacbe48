"""The notebooks as files, and as a person runs them: alone, with plain papermill or by hand, from any folder."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import nbformat
import papermill
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import Image
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from traitlets.config import Config

from helpers.errors import InputError
from helpers.paths import NOTEBOOKS, project_root
from helpers.quality import held_out_windows

TRAINING = project_root() / "notebooks/00_train_miniature.ipynb"  # parameters of its own, and no part of a report
FILES = [project_root() / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS.values()]
each_notebook = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_file = pytest.mark.parametrize("path", [TRAINING, *FILES], ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


# -- as files


def test_every_notebook_of_the_folder_is_one_that_the_command_line_runs_in_order() -> None:
    assert sorted(project_root().glob("notebooks/*.ipynb")) == [TRAINING, *FILES]
    assert all(path.name.startswith(f"{number}_") for number, path in zip(NOTEBOOKS, FILES, strict=True))


@each_file
def test_a_notebook_is_valid_and_stripped_of_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None
    assert "papermill" not in notebook.metadata
    assert not any(key in cell.metadata for cell in notebook.cells for key in ("execution", "papermill", "collapsed"))


@each_file
def test_a_notebook_asks_for_the_kernel_that_every_environment_has(path: Path) -> None:
    assert read(path).metadata.kernelspec.name == "python3"


@each_file
def test_cell_ids_are_stable_so_that_a_change_shows_as_one(path: Path) -> None:
    """Random ids would make each saved notebook a different file."""
    ids = [cell.id for cell in read(path).cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"{path.name[:2]}-\d\d[a-z]?", name) for name in ids)


@each_file
def test_exactly_one_cell_is_tagged_parameters_and_the_next_one_checks_them(path: Path) -> None:
    cells = code_cells(path)
    (tagged,) = (i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    check = "check_training_parameters" if path == TRAINING else "check_parameters"
    assert re.fullmatch(rf"\w+ = {check}\(globals\(\)\)", cells[tagged + 1].source)


@each_file
def test_code_cells_are_short_and_reach_helpers_without_path_tricks(path: Path) -> None:
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= 40
        assert not re.search(r"sys\.path|%run|!pip|os\.chdir|^%", cell.source, flags=re.MULTILINE)


@each_file
def test_a_notebook_begins_with_its_question_and_ends_with_what_it_does_not_show(path: Path) -> None:
    prose = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    assert re.match(r"# .*\?\n\n", prose[0])
    assert prose[-1].startswith("## What this does not show\n")


@each_file
def test_no_file_of_a_notebook_holds_an_absolute_path_or_fetches_anything(path: Path) -> None:
    text = path.read_text()
    assert str(project_root()) not in text
    assert not re.search(r"https?://(?!arxiv\.org)|/home/|/Users/|/root/", text)


# -- as a person runs them


@pytest.fixture
def small(mla_checkpoint: Path, tmp_path: Path) -> dict[str, object]:
    return {
        "checkpoint": str(mla_checkpoint), "seq_len": 16, "continuation": 4, "n_recent": 4, "budget": 4,
        "dtype": "float32", "run_dir": str(tmp_path / "runs" / "one"),
    }  # fmt: skip


def run_cells(path: Path, values: dict[str, object]) -> None:
    """Run a notebook's cells in an IPython of this process, with papermill's own injection, until one fails.

    This is what a kernel would do, without the seconds that a kernel takes to import everything again.
    """
    injected = parameterize_notebook(load_notebook_node(str(path)), values)
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    for cell in injected.cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source, store_history=True).raise_error()


@each_notebook
def test_a_misspelt_parameter_from_papermill_stops_the_notebook(
    path: Path, small: dict[str, object], tmp_path: Path
) -> None:
    """papermill only warns, and would let the default win."""
    for wrong, hint in (("seq_lenn", "Did you mean 'seq_len'?"), ("zzz", "Unknown parameter 'zzz'")):
        with pytest.raises(InputError) as caught:
            run_cells(path, small | {wrong: [3]})
        assert f"Unknown parameter '{wrong}'" in str(caught.value)
        assert hint in str(caught.value)
    assert not (tmp_path / "runs").exists()


@each_notebook
def test_a_text_for_a_number_from_papermill_stops_the_notebook(path: Path, small: dict[str, object]) -> None:
    """``papermill -p seq_len true`` and the like hand over texts."""
    with pytest.raises(InputError, match="seq_len takes a whole number, not 'true'"):
        run_cells(path, small | {"seq_len": "true"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sed": 1}, "Unknown parameter 'sed'. Did you mean 'seed'?"),
        ({"train": "no"}, "train takes a bool, not 'no'"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_the_training_notebook_refuses_what_it_does_not_know(
    wrong: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        run_cells(TRAINING, {"state": str(tmp_path / "state"), "checkpoint": str(tmp_path / "mini")} | wrong)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_training_notebook_trains_and_shows_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial of a few steps: its curve, its data, and figures that are a bad model's own."""
    shown: list[Any] = []
    monkeypatch.setattr("helpers.notebook.display", shown.append)
    # six documents: seconds instead of minutes
    for module in ("helpers.quality", "helpers.kimi_mini"):
        monkeypatch.setattr(f"{module}.held_out_windows", lambda corpus: held_out_windows(corpus)[:6])
    monkeypatch.setattr("helpers.quality.FAR", range(996, 1000, 4))
    run_cells(
        TRAINING,
        {
            "train": True, "plan": "trial", "checkpoint": str(tmp_path / "mini"), "state": str(tmp_path / "state"),
            "device": "cpu",
        },
    )  # fmt: skip
    assert sum(isinstance(output, Image) for output in shown) == 2
    text = " ".join(str(output.data) for output in shown)
    assert "in 6 steps, seed 0" in text
    assert "held-out loss" in text
    assert "topic:" in text
    assert "Python " in text


@pytest.mark.parametrize("number", ["02", "03"])
def test_a_notebook_run_alone_says_which_one_to_run_first(
    number: str, small: dict[str, object], tmp_path: Path
) -> None:
    earlier = {"02": NOTEBOOKS["01"], "03": NOTEBOOKS["02"]}[number]
    with pytest.raises(InputError) as caught:
        run_cells(project_root() / "notebooks" / f"{NOTEBOOKS[number]}.ipynb", small)
    assert f"run notebooks/{earlier}.ipynb" in str(caught.value)
    assert "python -m helpers report" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_first_notebook_runs_with_plain_papermill_from_another_folder(
    small: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README says it: a notebook, an output, a few parameters; nothing of the command line is needed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("MPLCONFIGDIR", mpl.get_cachedir())
    executed = papermill.execute_notebook(
        FILES[0], elsewhere / "out.ipynb", parameters=small, progress_bar=False, log_output=False
    )
    run_dir = Path(str(small["run_dir"]))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert list(manifest["steps"]) == [FILES[0].stem]
    assert [path.name for path in elsewhere.iterdir()] == ["out.ipynb"]
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert names == {"manifest.json", "figures/mass_by_head.png", "figures/mass_by_head.svg"}
    (capture,) = (run_dir.parent / "captures").iterdir()
    assert capture.stem == manifest["capture"]["digest"]
    prose = [
        output.data["text/markdown"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if "text/markdown" in output.get("data", {})
    ]
    # heads x queries, the identity that the capture must keep: 4 heads, 16 prompt queries
    assert any("The mass of all tokens is 64.000; heads × queries is 64," in text for text in prose)
    assert any("Largest weight on a future token: 0." in text for text in prose)
    errors = [output for cell in executed.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    assert errors == []


EDGES = {
    "one token and no query after it": {"seq_len": 1, "continuation": 0, "n_sink": 0, "n_recent": 0, "budget": 0},
    "nothing kept, and scores that are the null's": {"n_sink": 0, "n_recent": 0, "budget": 0, "embedding_std": 0.0},
    "everything protected, and scores that reach zero": {"n_sink": 8, "n_recent": 8, "embedding_std": 1000.0},
}


@pytest.mark.parametrize("edge", EDGES)
def test_all_notebooks_run_at_the_edges_of_what_is_allowed(
    edge: str, small: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check lets through must not fail later, nor make a sentence of nonsense or a warning in the page."""
    shown: list[Any] = []
    monkeypatch.setattr("helpers.notebook.display", shown.append)
    values = small | EDGES[edge]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for path in FILES[:3]:
            run_cells(path, values)
        if edge.startswith("nothing kept"):
            run_cells(FILES[3], values | {"n_texts": 3})
        else:  # nothing to judge by, or nothing to choose
            with pytest.raises(InputError, match=r"set continuation to at least 1|keeps them all: raise seq_len"):
                run_cells(FILES[3], values)
    assert [
        str(warning.message)
        for warning in warned
        if not issubclass(warning.category, (DeprecationWarning, ResourceWarning))
    ] == []
    text = "\n".join(str(part.data) for part in shown if not isinstance(part, Image))
    assert len(text) > 1000
    assert re.findall(r"[^.]*\b(?:nan|inf)\b[^.]*", text) == []
    run_dir = Path(str(values["run_dir"]))
    assert json.loads((run_dir / "manifest.json").read_text())["status"] == "complete"
    summary = json.loads((run_dir / "summary.json").read_text())
    counts, n = summary["run"]["counts"], int(str(values["seq_len"]))
    n_protected = int(str(values.get("n_sink", 4))) + int(str(values["n_recent"]))
    heavy = min(int(str(values["budget"])), n - n_protected)
    assert (counts["kept"], counts["heavy"], counts["evicted"]) == (n_protected + heavy, heavy, n - n_protected - heavy)
    assert summary["run"]["score_mean"] == pytest.approx(4, rel=1e-6)  # heads, an identity
    if values.get("embedding_std") == 0:  # then every query looks at all tokens alike, which is the null
        assert summary["run"]["score_max"] == pytest.approx(summary["null"]["score_max"], rel=1e-6)
        assert summary["squared_correlation_with_null"] == pytest.approx(1)
