"""Parameters: one list behind every door, and nothing misspelt, mistyped or impossible gets past it."""

from __future__ import annotations

import ast
import dataclasses
import math
from pathlib import Path
from typing import Any

import nbformat
import papermill.translators
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.errors import InputError
from helpers.parameters import (
    CAPTURE_PARAMETERS,
    POLICY_NAMES,
    PRESETS,
    SCORE_NAMES,
    Parameters,
    check_parameters,
)
from helpers.paths import NOTEBOOKS, project_root
from helpers.policies import CONTROLS
from helpers.scores import SCORES

FIELDS = dataclasses.fields(Parameters)
NAMES = [field.name for field in FIELDS]
# A value that is allowed and isn't the default, for each parameter; a new parameter has to be added here.
OTHER: dict[str, Any] = {
    "checkpoint": "checkpoints/another", "layer": 1, "input": "random", "text": "notes.txt", "seq_len": 128,
    "continuation": 0, "n_sink": 0, "n_recent": 0, "budget": 0, "embedding_std": 0.5, "seed": 1, "device": "cpu",
    "dtype": "float32", "run_dir": "results/another", "score": "mean", "policies": ("sum", "recency"),
    "budgets": (4, 8), "n_texts": 2, "n_seeds": 2,
}  # fmt: skip


POSITIVE = {"seq_len", "n_texts", "n_seeds"}


def kinds(kind: str) -> list[str]:
    return [field.name for field in FIELDS if field.type == kind]


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        Parameters.check(values)
    return str(caught.value)


# -- names


def test_the_list_of_parameters_is_the_documented_one() -> None:
    """The names are a contract: they are the same in notebooks, YAML, on the command line and in manifests."""
    assert set(NAMES) == set(OTHER)
    assert set(CAPTURE_PARAMETERS) == set(NAMES) - {
        "n_sink", "n_recent", "budget", "run_dir", "score", "policies", "budgets", "n_texts", "n_seeds",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("seq_lenn", "seq_len"), ("seqlen", "seq_len"), ("n_sinks", "n_sink"),
        ("n_recents", "n_recent"), ("buget", "budget"), ("checkpint", "checkpoint"), ("layers", "layer"),
        ("embeding_std", "embedding_std"), ("divice", "device"), ("rundir", "run_dir"), ("continuaton", "continuation"),
    ],
)  # fmt: skip
def test_a_misspelt_name_is_refused_with_the_nearest_right_one(wrong: str, right: str) -> None:
    assert f"Unknown parameter '{wrong}'. Did you mean '{right}'?" in refusal({wrong: 1})


def test_capitals_are_for_the_command_line_only() -> None:
    """There ``SEQ_LEN`` is lowered; in a notebook or YAML file it would be a second variable."""
    assert "Unknown parameter 'SEQ_LEN'" in refusal({"SEQ_LEN": 3})


def test_a_name_near_nothing_is_refused_without_a_guess_and_with_the_list() -> None:
    message = refusal({"zzz": 1})
    assert "Did you mean" not in message
    assert all(name in message for name in NAMES)


# -- types


@pytest.mark.parametrize("name", kinds("int"))
@pytest.mark.parametrize("value", [True, False, 3.0, 3.5, "3", "three", None, [3], math.nan])
def test_a_whole_number_is_not_a_truth_value_a_fraction_or_a_text(name: str, value: object) -> None:
    assert refusal({name: value}) == f"{name} takes a whole number, not {value!r}."


@pytest.mark.parametrize("value", [True, "1.0", None, [1.0], math.nan, math.inf, -math.inf])
def test_a_number_is_not_a_truth_value_a_text_or_infinite(value: object) -> None:
    assert refusal({"embedding_std": value}) == f"embedding_std takes a number, not {value!r}."


@pytest.mark.parametrize("name", kinds("str"))
@pytest.mark.parametrize("value", [True, 3, 3.0, None, ["a"], Path("a")])
def test_a_text_is_not_a_number_a_list_or_a_path(name: str, value: object) -> None:
    assert refusal({name: value}) == f"{name} takes text, not {value!r}."


def test_a_whole_number_will_do_where_a_fraction_is_asked_for() -> None:
    """YAML writes ``embedding_std: 1``; the run is the same as with 1.0, and so is its name."""
    checked = Parameters.check({"embedding_std": 1})
    assert isinstance(checked.embedding_std, float)
    assert checked.run_id == Parameters().run_id


def test_a_whole_number_beyond_every_float_is_refused_not_raised_through() -> None:
    assert "embedding_std" in refusal({"embedding_std": 10**400})


@pytest.mark.parametrize("name", ["policies", "budgets"])
@pytest.mark.parametrize("value", [True, 3, "sum", None, [3.5], [None], {"sum": 1}])
def test_a_list_is_a_list_of_the_right_things(name: str, value: object) -> None:
    what = {"policies": "a list of words", "budgets": "a list of whole numbers"}[name]
    assert refusal({name: value}) == f"{name} takes {what}, not {value!r}."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policies": ["sum", "recensy"]}, "not 'recensy'. Did you mean 'recency'?"),
        ({"policies": []}, "policies is empty"),
        ({"policies": ["sum", "sum"]}, "policies names 'sum' twice"),
        ({"budgets": [4, -1]}, "budgets must be at least 0, not -1"),
        ({"budgets": [8, 4, 8]}, "budgets names 8 twice"),
    ],
)
def test_what_a_list_cannot_hold_is_named(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize("text", ["8,4", "[8, 4]", " 4 , 8 "])
def test_lists_are_written_with_commas_on_a_command_line_and_ordered(text: str) -> None:
    assert Parameters.parse({"budgets": text}).budgets == (4, 8)
    assert Parameters.parse({"policies": "random,sum"}).policies == ("sum", "random")


def test_a_list_of_words_on_a_command_line_is_refused_where_numbers_are_asked_for() -> None:
    with pytest.raises(InputError, match="budgets takes a list of whole numbers, not '4,many'"):
        Parameters.parse({"budgets": "4,many"})


def test_the_scores_named_are_those_there_are() -> None:
    assert tuple(SCORES) == SCORE_NAMES
    assert (*SCORE_NAMES, *CONTROLS) == POLICY_NAMES


# -- ranges and choices


@pytest.mark.parametrize("name", [*kinds("int"), "embedding_std"])
def test_negative_numbers_are_refused(name: str) -> None:
    low = 1 if name in POSITIVE else 0
    assert refusal({name: -1}) == f"{name} must be at least {low}, not -1."


def test_seq_len_must_be_at_least_one() -> None:
    assert refusal({"seq_len": 0}) == "seq_len must be at least 1, not 0."
    assert Parameters.check({"seq_len": 1, "n_sink": 0, "n_recent": 0}).seq_len == 1


@pytest.mark.parametrize("name", sorted(set(kinds("int")) - POSITIVE))
def test_zero_is_allowed_for_every_other_count(name: str) -> None:
    assert getattr(Parameters.check({name: 0}), name) == 0


def test_a_seed_that_torch_cannot_take_is_refused() -> None:
    """torch's seeds end at 2**64 - 1; beyond, it would fail inside a kernel."""
    assert Parameters.check({"seed": 2**64 - 1}).seed == 2**64 - 1
    assert "seed" in refusal({"seed": 2**64})


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("input", "txt", "text"), ("device", "gpu", None), ("device", "CPU", None), ("dtype", "bfloat", "bfloat16"),
     ("dtype", "float64", "float16, float32"), ("input", "", None)],
)  # fmt: skip
def test_a_choice_outside_the_list_is_refused_with_the_list(name: str, wrong: str, right: str | None) -> None:
    choices = {
        "input": "auto, random, text", "device": "auto, cpu, cuda", "dtype": "bfloat16, float16, float32",
    }  # fmt: skip
    message = refusal({name: wrong})
    assert message.startswith(f"{name} must be one of {choices[name]}, not {wrong!r}.")
    assert right is None or right in message


@pytest.mark.parametrize("name", ["checkpoint", "text"])
def test_an_empty_path_is_refused(name: str) -> None:
    assert refusal({name: ""}).startswith(f"{name} is empty")


@pytest.mark.parametrize(("n_sink", "n_recent", "seq_len"), [(4, 32, 35), (0, 2, 1), (300, 0, 256)])
def test_more_protected_tokens_than_there_are_is_refused_with_all_three_numbers(
    n_sink: int, n_recent: int, seq_len: int
) -> None:
    message = refusal({"n_sink": n_sink, "n_recent": n_recent, "seq_len": seq_len})
    assert f"n_sink {n_sink}" in message
    assert f"n_recent {n_recent}" in message
    assert f"seq_len {seq_len}" in message


def test_exactly_as_many_protected_tokens_as_there_are_is_allowed() -> None:
    assert Parameters.check({"n_sink": 4, "n_recent": 32, "seq_len": 36}).seq_len == 36


# -- values that are still text


@given(st.integers(min_value=0, max_value=10**9), st.floats(min_value=0, max_value=1e6))
def test_numbers_written_as_text_are_read_back_as_they_are(budget: int, embedding_std: float) -> None:
    parsed = Parameters.parse({"budget": str(budget), "embedding_std": repr(embedding_std)})
    assert (parsed.budget, parsed.embedding_std) == (budget, embedding_std)


def test_a_text_that_looks_like_a_number_stays_text_where_text_is_asked_for() -> None:
    assert Parameters.parse({"checkpoint": "42", "run_dir": "7"}) == Parameters(checkpoint="42", run_dir="7")


@pytest.mark.parametrize("text", ["", "many", "1.5", "1e3", "true", "nan", "0x10", "1,000"])
def test_a_text_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^seq_len takes a whole number, not "):
        Parameters.parse({"seq_len": text})


@pytest.mark.parametrize("text", ["", "wide", "nan", "inf", "-inf", "1e999"])
def test_a_text_that_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^embedding_std takes a number, not "):
        Parameters.parse({"embedding_std": text})


def test_a_misspelt_name_is_refused_among_texts_too() -> None:
    with pytest.raises(InputError, match=r"Unknown parameter 'seq_lenn'\. Did you mean 'seq_len'\?"):
        Parameters.parse({"seq_lenn": "3"})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_check(preset: str) -> None:
    assert Parameters.check(PRESETS[preset]) == Parameters(**PRESETS[preset])


# -- names of runs


def test_the_same_parameters_name_the_same_run() -> None:
    assert Parameters.check(OTHER).run_id == Parameters.parse({k: str(v) for k, v in OTHER.items()}).run_id


@pytest.mark.parametrize("name", NAMES)
def test_each_single_parameter_changes_the_name_of_the_run_but_its_own_folder(name: str) -> None:
    """Runs that differ in anything must never share a folder; where a run is put is no part of what it is."""
    changed = Parameters.check({name: OTHER[name]})
    assert (changed.run_id == Parameters().run_id) == (name == "run_dir")


def test_two_checkpoints_of_one_folder_name_are_different_runs(tmp_path: Path) -> None:
    one, two = (Parameters(checkpoint=str(tmp_path / place / "model")) for place in ("here", "there"))
    assert one.run_id != two.run_id


def test_a_folder_of_the_project_is_the_same_run_however_it_is_written() -> None:
    inside = Parameters(checkpoint="checkpoints/some")
    assert Parameters(checkpoint=str(project_root() / "checkpoints/some")).run_id == inside.run_id
    assert Parameters(checkpoint="./checkpoints/../checkpoints/some").run_id == inside.run_id


def test_two_texts_of_one_file_name_are_different_runs(tmp_path: Path) -> None:
    one, two = (Parameters(text=str(tmp_path / place / "words.txt")) for place in ("here", "there"))
    assert one.run_id != two.run_id


def test_a_relative_path_is_looked_for_here_and_then_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files to read are where a person sees them; a run folder is always in the one place that all commands know."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    mine = Parameters(checkpoint="model", text="README.md", run_dir="results/one")
    assert mine.paths() == [tmp_path / "model", project_root() / "README.md", project_root() / "results/one"]
    assert mine.run_id == Parameters(checkpoint=str(tmp_path / "model"), text=str(project_root() / "README.md")).run_id


def test_the_name_of_a_run_can_be_a_folder_and_says_what_the_run_is(tmp_path: Path) -> None:
    run_id = Parameters(checkpoint=str(tmp_path / "some-model"), layer=7, seq_len=99, budget=5).run_id
    assert run_id.startswith("some-model-layer7-auto-99-budget5-")
    assert "/" not in run_id


# -- the state of the files


def test_the_fingerprint_follows_what_the_files_hold_not_where_they_lie(tmp_path: Path) -> None:
    def fingerprint(place: str, config: str = "{}", weights: bytes = b"1", text: str = "words") -> str:
        folder = tmp_path / place / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        (tmp_path / place / "words.txt").write_text(text)
        return Parameters(checkpoint=str(folder), text=str(tmp_path / place / "words.txt")).fingerprint()

    first = fingerprint("first")
    assert fingerprint("the same elsewhere") == first
    assert fingerprint("another config", config="{ }") != first
    assert fingerprint("other weights", weights=b"2") != first
    assert fingerprint("another text", text="other words") != first


# -- what may stand in a file that is shared


def test_shared_parameters_hold_no_absolute_path(tmp_path: Path) -> None:
    mine = Parameters(
        checkpoint=str(tmp_path / "model"), text=str(tmp_path / "words.txt"), run_dir=str(tmp_path / "run")
    )
    shared = mine.portable()
    assert (shared["checkpoint"], shared["text"], shared["run_dir"]) == ("model", "words.txt", "run")
    assert str(tmp_path) not in str(shared)


def test_shared_parameters_hold_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    shared = Parameters(checkpoint="~/model", text="~/words.txt", run_dir="~/run").portable()
    assert "somebody" not in str(shared)
    assert "~" not in str(shared)


def test_shared_parameters_keep_paths_of_the_project_and_all_other_values() -> None:
    mine = Parameters.check(OTHER)
    assert mine.portable() == mine.values()
    assert Parameters().portable() == Parameters().values()


# -- notebooks


def notebook_namespace(**changes: object) -> dict[str, object]:
    return Parameters().values() | changes


def injected(**values: object) -> dict[str, object]:
    """A notebook's globals after papermill injected ``values``, the cell in the very words of papermill."""
    cell = papermill.translators.PythonTranslator.codify(values)
    return notebook_namespace(In=["", "import helpers", cell], **values)


def test_the_check_of_a_notebook_takes_the_values_of_its_variables() -> None:
    namespace = notebook_namespace(seq_len=99, device="cpu")
    assert check_parameters(namespace) == Parameters(seq_len=99, device="cpu")


def test_the_check_of_a_notebook_refuses_wrong_values_too() -> None:
    with pytest.raises(InputError, match="seq_len takes a whole number, not 'many'"):
        check_parameters(notebook_namespace(seq_len="many"))


@pytest.mark.parametrize(
    ("wrong", "right"), [("seq_lenn", "seq_len"), ("n_sinks", "n_sink"), ("buget", "budget"), ("dtypes", "dtype")]
)
def test_a_misspelt_variable_of_a_notebook_is_refused(wrong: str, right: str) -> None:
    """In JupyterLab a person edits the cell; a typing slip there makes a new variable beside the default."""
    with pytest.raises(InputError, match=rf"'{wrong}' is not a parameter\. Did you mean '{right}'\?"):
        check_parameters(notebook_namespace(**{wrong: 3}))


def test_what_is_no_misspelt_parameter_is_left_alone() -> None:
    """Functions, modules, private names and names of one's own are a notebook's ordinary contents."""

    def layers() -> None:  # a function, however near its name is
        """Nothing."""

    namespace = notebook_namespace(
        layers=layers, texts=math, __name__="__main__", _seed=3, answer=42, title="x", summed=[1.0], In=["", "x = 1"]
    )
    assert check_parameters(namespace) == Parameters()


def test_a_name_that_papermill_injected_is_refused_however_far_from_any_parameter() -> None:
    with pytest.raises(InputError, match="Unknown parameter 'wurst'"):
        check_parameters(injected(wurst=3))
    with pytest.raises(InputError, match=r"Unknown parameter 'seq_lenn'\. Did you mean 'seq_len'\?"):
        check_parameters(injected(seq_lenn=[3]))


def test_right_names_that_papermill_injected_are_taken() -> None:
    values = {"seq_len": 99, "text": "a 'quoted' name\n.txt", "embedding_std": 0.5}
    assert check_parameters(injected(**values)) == Parameters(**values)


@pytest.mark.parametrize("name", NOTEBOOKS.values())
def test_the_parameters_cell_of_each_notebook_is_the_list_of_parameters(name: str) -> None:
    """Literals with plain annotations only: anything else papermill can't list or replace."""
    notebook = nbformat.read(project_root() / f"notebooks/{name}.ipynb", as_version=4)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    found = []
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.AnnAssign), ast.unparse(statement)
        assert isinstance(statement.target, ast.Name)
        assert isinstance(statement.annotation, ast.Name)
        assert statement.value is not None
        found.append((statement.target.id, statement.annotation.id, ast.literal_eval(statement.value)))
    plain = Parameters().values()  # lists for tuples
    expected = [(name, type(value).__name__, value) for name, value in plain.items()]
    assert found == expected
    assert [type(value) for *_, value in found] == [type(value) for *_, value in expected]  # 1 is not 1.0
