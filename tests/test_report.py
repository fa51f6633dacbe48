"""One whole report, looked at from outside: its tables, its figures, its manifest, and what its pages are made of.

Nothing here uses the project's own reading or arithmetic: files are read with Python's csv and json, and every figure
is computed again with plain Python.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import re
import statistics
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import PIECES, SmallReport, stored_tensors, trace
from PIL import Image

from helpers.parameters import POLICY_NAMES

SEQ_LEN, N_SINK, N_RECENT, BUDGET, HEADS, LAYER = 48, 4, 8, 12, 4, 1
NOTEBOOKS = ("01_capture_attention", "02_score_tokens", "03_evict_h2o", "04_compare_policies")


def table(report: SmallReport, name: str) -> list[dict[str, str]]:
    with (report.folder / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def json_of(report: SmallReport, name: str) -> Any:
    return json.loads((report.folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scores(small_report: SmallReport) -> list[float]:
    return [float(row["attention_score"]) for row in table(small_report, "scores.csv")]


@pytest.fixture(scope="module")
def null() -> list[float]:
    """Attention that spreads evenly over what each query sees, by its definition."""
    return [HEADS * math.fsum(1 / (i + 1) for i in range(j, SEQ_LEN)) for j in range(SEQ_LEN)]


def categories(score: list[float]) -> list[str]:
    """Sinks, recents and the top of the middle, written as a person would say it."""
    middle = range(N_SINK, SEQ_LEN - N_RECENT)
    heavy = set(sorted(middle, key=lambda j: (-score[j], j))[:BUDGET])
    return [
        "sink" if j < N_SINK else "recent" if j >= SEQ_LEN - N_RECENT else "heavy" if j in heavy else "evicted"
        for j in range(SEQ_LEN)
    ]


# -- files and tables


def test_the_run_folder_holds_every_artefact_and_nothing_else(small_report: SmallReport) -> None:
    figures = ["mass_by_head", "score_and_null", "score_over_null", "score_by_category", "sorted_scores"]
    figures += ["policies_share_kept", "policies_output_error", "policies_per_head", "policies_online"]
    expected = {f"{name}.html" for name in (*NOTEBOOKS, "index")}
    expected |= {"manifest.json", "scores.csv", "heavy_tails.csv", "eviction.csv", "summary.json", "policies.csv"}
    expected |= {f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")}
    found = {str(path.relative_to(small_report.folder)) for path in small_report.folder.rglob("*") if path.is_file()}
    assert found == expected
    beside = {path.name for path in small_report.folder.parent.iterdir()}
    assert beside == {"small-report", "captures"}


def test_the_command_says_where_the_report_is(small_report: SmallReport) -> None:
    assert small_report.stdout == f"Report: {small_report.folder / 'index.html'}\n"


def test_a_progress_bar_a_notebook_reaches_its_end(small_report: SmallReport) -> None:
    for name in NOTEBOOKS:
        assert re.search(rf"{name}: 100%", small_report.stderr)


def test_scores_are_the_column_sums_of_the_full_model_s_own_attention(
    small_report: SmallReport, scores: list[float], mla_model: torch.nn.Module
) -> None:
    """transformers' whole model reads the same ids; its eager attention matrix is summed by hand."""
    seen = trace(mla_model, torch.tensor([small_report.ids]))[LAYER].probabilities[0].double()
    by_hand = [
        math.fsum(float(seen[head, i, j]) for head in range(HEADS) for i in range(j, SEQ_LEN)) for j in range(SEQ_LEN)
    ]
    assert scores == pytest.approx(by_hand, rel=1e-4)
    assert math.fsum(scores) == pytest.approx(HEADS * SEQ_LEN, rel=1e-6)


def test_scores_csv_holds_each_token_its_visible_queries_and_the_null(
    small_report: SmallReport, null: list[float]
) -> None:
    rows = table(small_report, "scores.csv")
    assert list(rows[0])[:5] == ["token_idx", "token", "attention_score", "visible_queries", "null_score"]
    assert list(rows[0])[5:] == ["mean", "calibrated", "window", "last", "decayed"]
    assert [row["token"] for row in rows] == [PIECES[i] for i in small_report.ids[:SEQ_LEN]]
    assert [row["token_idx"] for row in rows] == [str(j) for j in range(SEQ_LEN)]
    assert [row["visible_queries"] for row in rows] == [str(SEQ_LEN - j) for j in range(SEQ_LEN)]
    assert [float(row["null_score"]) for row in rows] == pytest.approx(null, rel=1e-12)


def test_eviction_csv_is_exactly_what_was_promised(small_report: SmallReport, scores: list[float]) -> None:
    lines = (small_report.folder / "eviction.csv").read_bytes().decode().split("\n")
    assert lines[0] == "token_idx,attention_score,kept,category"
    assert lines[-1] == ""
    rows = table(small_report, "eviction.csv")
    assert [row["token_idx"] for row in rows] == [str(j) for j in range(SEQ_LEN)]
    assert [float(row["attention_score"]) for row in rows] == scores
    assert [row["category"] for row in rows] == categories(scores)
    assert [row["kept"] for row in rows] == [str(row["category"] != "evicted") for row in rows]
    assert sum(row["kept"] == "True" for row in rows) == N_SINK + N_RECENT + BUDGET


# -- the summary


def figures_of(score: list[float]) -> dict[str, Any]:
    """The published demo's figures, computed with nothing but Python."""
    category = categories(score)
    heavy, evicted = ([score[j] for j in range(SEQ_LEN) if category[j] == name] for name in ("heavy", "evicted"))
    counts = {name: category.count(name) for name in ("sink", "recent", "heavy", "evicted")}
    counts["kept"] = SEQ_LEN - counts["evicted"]
    earliest = range(N_SINK, N_SINK + len(heavy))
    return {
        "score_min": min(score),
        "score_max": max(score),
        "score_mean": statistics.fmean(score),
        "score_std": statistics.stdev(score),
        "heavy_mean": statistics.fmean(heavy),
        "evicted_mean": statistics.fmean(evicted),
        "heavy_to_evicted": statistics.fmean(heavy) / statistics.fmean(evicted),
        "counts": counts,
        "shares": {name: count / SEQ_LEN for name, count in counts.items()},
        "top": sorted((-score[j], j) for j in range(SEQ_LEN) if category[j] == "heavy")[:10],
        "heavy_among_earliest": sum(category[j] == "heavy" for j in earliest),
    }


@pytest.mark.parametrize("column", ["run", "null"])
def test_every_figure_of_the_summary_can_be_computed_again_from_the_table(
    column: str, small_report: SmallReport, scores: list[float], null: list[float]
) -> None:
    found = json_of(small_report, "summary.json")[column]
    expected = figures_of({"run": scores, "null": null}[column])
    top = expected.pop("top")
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), name
    assert [row["token_idx"] for row in found["top_heavy"]] == [j for _, j in top]
    assert [row["attention_score"] for row in found["top_heavy"]] == pytest.approx([-score for score, _ in top])
    assert found.keys() == expected.keys() | {"top_heavy"}


def test_the_summary_says_what_was_run_and_how_much_position_explains(
    small_report: SmallReport, scores: list[float], null: list[float], mla_model: torch.nn.Module
) -> None:
    summary = json_of(small_report, "summary.json")
    assert summary["config"] == "layer=1 seq_len=48 n_sink=4 n_recent=8 budget=12 dtype=float32"
    assert summary["geometry"] == {
        "n_heads": HEADS, "seq_len": SEQ_LEN, "n_sink": N_SINK, "n_recent": N_RECENT, "budget": BUDGET,
    }  # fmt: skip
    assert summary["shapes"] == {"hidden_states": [1, 64, 64], "attention_mass": [HEADS, SEQ_LEN]}
    attention = mla_model.get_decoder().layers[LAYER].self_attn
    assert summary["parameter_count"] == sum(tensor.numel() for tensor in attention.state_dict().values())
    assert summary["squared_correlation_with_null"] == pytest.approx(statistics.correlation(scores, null) ** 2)
    middle = slice(N_SINK, SEQ_LEN - N_RECENT)
    among = statistics.correlation(scores[middle], null[middle]) ** 2
    assert summary["squared_correlation_with_null_in_the_middle"] == pytest.approx(among)
    assert summary["weights"] == "RANDOM weights of a small model"


# -- the manifest


def test_the_manifest_says_complete_and_how_long_each_step_took(small_report: SmallReport) -> None:
    manifest = json_of(small_report, "manifest.json")
    assert manifest["status"] == "complete"
    assert manifest["error"] is None
    assert list(manifest["steps"]) == [*NOTEBOOKS, "report"]
    assert {step["status"] for step in manifest["steps"].values()} == {"complete"}
    seconds = [step["seconds"] for step in manifest["steps"].values()]
    assert all(second >= 0 for second in seconds)
    assert 0 < sum(seconds) < small_report.seconds
    assert all(2**26 < step["peak_memory_bytes"] < 2**36 for step in manifest["steps"].values())
    assert manifest["capture"]["seconds"] >= 0


def test_the_manifest_holds_the_parameters_the_environment_and_the_seed(small_report: SmallReport) -> None:
    manifest = json_of(small_report, "manifest.json")
    assert manifest["parameters"] == {
        "checkpoint": "small-kimi", "layer": LAYER, "input": "auto", "text": small_report.text.name,
        "seq_len": SEQ_LEN, "continuation": 16, "n_sink": N_SINK, "n_recent": N_RECENT, "budget": BUDGET,
        "embedding_std": 1.0, "seed": 0, "device": "auto", "dtype": "float32", "run_dir": "small-report",
        "score": "sum", "policies": list(POLICY_NAMES), "budgets": [], "n_texts": 20, "n_seeds": 3,
    }  # fmt: skip
    assert manifest["input"]["device"] in ("cpu", "cuda")
    assert manifest["environment"]["versions"]["torch"] == torch.__version__
    assert manifest["environment"]["threads"] >= 1
    assert {"python", "machine", "gpu", "code"} <= manifest["environment"].keys()


def test_the_manifest_knows_checkpoint_and_text_by_their_digests(small_report: SmallReport) -> None:
    manifest = json_of(small_report, "manifest.json")
    for key, file in (("config_sha256", "config.json"), ("index_sha256", "model.safetensors.index.json")):
        assert manifest["checkpoint"][key] == hashlib.sha256((small_report.checkpoint / file).read_bytes()).hexdigest()
    assert manifest["checkpoint"]["name"] == "small-kimi"
    assert manifest["input"]["text_sha256"] == hashlib.sha256(small_report.text.read_bytes()).hexdigest()


def test_the_manifest_points_at_the_very_bytes_of_each_tensor(
    small_report: SmallReport, mla_model: torch.nn.Module
) -> None:
    """A reader who has only the manifest and the shards can cut every weight that was used out of them."""
    weights = stored_tensors(mla_model)
    tensors = json_of(small_report, "manifest.json")["tensors"]
    prefix = f"language_model.model.layers.{LAYER}.self_attn."
    held = {f"language_model.{name}" for name in weights if name.startswith(f"model.layers.{LAYER}.self_attn.")}
    assert {tensor["name"] for tensor in tensors} == held
    assert len(tensors) == 7
    for tensor in tensors:
        assert tensor["name"].startswith(prefix)
        assert tensor["dtype"] == "F32"
        start, end = tensor["byte_range"]
        data = (small_report.checkpoint / tensor["shard"]).read_bytes()[start:end]
        stored = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(tensor["shape"])
        assert torch.equal(stored, weights[tensor["name"].removeprefix("language_model.")])


def test_the_capture_lies_beside_the_run_under_its_digest(small_report: SmallReport) -> None:
    digest = json_of(small_report, "manifest.json")["capture"]["digest"]
    stored = {path.name for path in (small_report.folder.parent / "captures").iterdir()}
    assert f"{digest}.safetensors" in stored
    assert len(stored) == 2  # the text's, and that of the random embeddings beside it


# -- nothing of the machine it was made on


def test_no_artefact_tells_whose_machine_it_was_made_on(small_report: SmallReport) -> None:
    """Reports are mailed: no absolute path, user, host, home or temporary folder, in any file and any byte of it."""
    files = [path for path in small_report.folder.parent.rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        data = path.read_bytes()
        found = [word for word in small_report.private if word.encode() in data]
        assert found == [], path.name
        if path.suffix in (".html", ".json", ".csv", ".svg"):
            assert not re.search(rb"(?<![\w.:/<])/(home|root|Users|tmp|var|work|usr|opt)/\w", data), path.name


def test_figures_carry_no_date_and_no_maker(small_report: SmallReport) -> None:
    """The same data gives the same file, byte for byte; PNG text chunks and SVG metadata would differ."""
    for path in (small_report.folder / "figures").glob("*.png"):
        with Image.open(path) as image:
            assert set(image.info) <= {"dpi"}
    for path in (small_report.folder / "figures").glob("*.svg"):
        assert "<dc:date>" not in path.read_text()
        assert "<dc:creator>" not in path.read_text()


# -- pages that stand alone


class Page(HTMLParser):
    """What a page is made of: every tag with its attributes, and where it stands."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input", "source", "wbr", "col"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.texts: list[tuple[str, tuple[str, ...]]] = []
        self.unbalanced: list[str] = []
        self.open: list[str] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs), tuple(self.open)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append((data, tuple(self.open)))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes, _ in self.tags if tag == name]

    def text_in(self, name: str) -> list[str]:
        return [text for text, inside in self.texts if name in inside]


PAGE_NAMES = [*(f"{name}.html" for name in NOTEBOOKS), "index.html"]


@pytest.fixture(params=PAGE_NAMES)
def page(request: pytest.FixtureRequest, small_report: SmallReport) -> Page:
    return Page(small_report.folder / request.param)


def test_a_page_refers_to_nothing_outside_itself(page: Page) -> None:
    """It must read the same with the network off, and tell nobody that it was opened."""
    assert {tag for tag, *_ in page.tags} & {"script", "iframe", "object", "embed", "base", "video", "audio"} == set()
    for tag, attributes, _ in page.tags:
        assert [name for name in attributes if name.startswith("on")] == []
        for name in ("src", "href", "srcset", "action", "poster", "data", "background", "xlink:href"):
            value = attributes.get(name)
            if value is not None:
                local = value.startswith("data:") or (tag == "a" and re.fullmatch(r"[\w./-]+", value))
                assert local, (tag, name, value[:80])
    assert "http://" not in page.source
    assert "https://" not in page.source
    css = "".join(page.text_in("style")) + "".join(str(attributes.get("style")) for _, attributes, _ in page.tags)
    assert len(css) > 1000
    assert not re.search(r"url\s*\(|@import|@font-face|expression\s*\(", css)
    assert not any(attributes.get("http-equiv") for attributes in page.all("meta"))


def test_every_link_leads_to_a_file_of_the_run(page: Page, small_report: SmallReport) -> None:
    links = [str(attributes["href"]) for attributes in page.all("a")]
    assert len(links) >= 3  # at least the other pages
    assert [link for link in links if not (small_report.folder / link).is_file()] == []


def test_the_front_page_links_every_file_of_the_run(small_report: SmallReport) -> None:
    links = {attributes["href"] for attributes in Page(small_report.folder / "index.html").all("a")}
    files = {str(path.relative_to(small_report.folder)) for path in small_report.folder.rglob("*") if path.is_file()}
    assert files - links == {"index.html"}


def test_a_page_has_a_language_a_title_a_width_and_headings_in_order(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    (title,) = ["".join(page.text_in("title")).strip()]
    assert len(title) > 5
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    levels = [int(tag[1]) for tag, *_ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert {"header", "main", "nav"} <= {tag for tag, *_ in page.tags}


def test_pages_have_titles_of_their_own(small_report: SmallReport) -> None:
    titles = {"".join(Page(path).text_in("title")) for path in small_report.pages}
    assert len(titles) == len(PAGE_NAMES)


def test_a_page_is_well_formed(page: Page) -> None:
    """A tag left open by some text, such as a file's name, would swallow what follows."""
    assert page.unbalanced == []
    assert page.open == []


def test_every_image_is_inside_the_page_and_described(page: Page) -> None:
    images = page.all("img")
    assert images
    for image in images:
        assert str(image["src"]).startswith("data:image/png;base64,")
        assert len(str(image["alt"] or "")) > 40


def test_every_figure_is_shown_as_its_own_file_holds_it(small_report: SmallReport) -> None:
    shown = {
        base64.b64decode(str(image["src"]).partition(",")[2])
        for path in small_report.pages
        for image in Page(path).all("img")
    }
    assert shown == {path.read_bytes() for path in (small_report.folder / "figures").glob("*.png")}


def test_code_is_folded_away_and_whole(small_report: SmallReport) -> None:
    for name in NOTEBOOKS:
        page = Page(small_report.folder / f"{name}.html")
        folded = page.all("details")
        assert len(folded) > 5
        assert all("open" not in attributes for attributes in folded)
        code = "".join(page.text_in("details"))
        assert "check_parameters(globals())" in code
        shown = "".join(text for text, inside in page.texts if not {"details", "style"} & set(inside))
        assert "from helpers" not in shown


def test_every_table_has_a_caption_and_headed_columns(page: Page) -> None:
    tables = len(page.all("table"))
    assert tables >= 1
    assert len(page.all("caption")) == tables
    assert len(page.all("thead")) == tables
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))


def test_a_page_stays_small(small_report: SmallReport) -> None:
    assert all(path.stat().st_size < 3_000_000 for path in small_report.pages)


def test_no_page_shows_an_error_or_a_warning(page: Page) -> None:
    shown = "".join(page.text_in("main"))
    assert not re.search(r"Traceback|Warning\b|Error:", shown)
    assert not re.search(r"\bnan\b(?!')", shown)  # one token is the word nan, and is shown quoted


def test_what_was_read_for_a_text_at_a_deeper_layer_is_said(small_report: SmallReport) -> None:
    shown = "".join(Page(small_report.folder / "01_capture_attention.html").text_in("main"))
    n_bytes = json_of(small_report, "manifest.json")["checkpoint"]["bytes_read"]
    assert f"embedding rows, decoder layer 0 and this layer's input norm were read and run: {n_bytes:,} bytes" in shown


# -- text that looks like markup


def test_a_token_that_is_a_script_is_shown_as_text(small_report: SmallReport) -> None:
    """The token stands at every other place of the beginning, so it is among the highest scores of both tables."""
    for name in ("02_score_tokens", "03_evict_h2o"):
        page = Page(small_report.folder / f"{name}.html")
        assert "<script" not in page.source.lower()
        assert "'<script>alert(1)</script>'" in page.text_in("td")


def test_a_file_name_that_looks_like_markup_is_shown_as_text(small_report: SmallReport) -> None:
    assert "<mark>" in small_report.text.name
    for path in small_report.pages:
        page = Page(path)
        assert page.all("mark") == []
        assert small_report.text.name in "".join(page.text_in("main"))


# -- sentences and tables agree with the data


def test_the_front_page_shows_the_figures_of_the_summary(
    small_report: SmallReport, scores: list[float], null: list[float]
) -> None:
    source = (small_report.folder / "index.html").read_text(encoding="utf-8")
    rows = {
        re.sub("<.*?>", "", cells[0]): [re.sub("<.*?>", "", cell) for cell in cells[1:]]
        for row in re.findall(r"<tr>(.*?)</tr>", source, flags=re.DOTALL)
        if len(cells := re.findall(r"<t[hd].*?</t[hd]>", row, flags=re.DOTALL)) == 5
    }

    def shown(value: float) -> str:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"

    run, even = figures_of(scores), figures_of(null)
    for label, key in (("score, maximum", "score_max"), ("mean of evicted", "evicted_mean")):
        assert rows[label][1:] == [shown(run[key]), shown(even[key]), shown(even[key] / run[key])]
    assert rows["heavy ÷ evicted"][:2] == ["3.660", shown(run["heavy_to_evicted"])]
    assert rows["tokens: kept"][:3] == ["100 (39.1%)", "24 (50.0%)", "24 (50.0%)"]
    assert "H2O keeps 24 of 48 tokens (50.0%: 4 sinks, 8 recents, 12 heavy hitters) and evicts 24 (50.0%)." in source
    assert "The weights of this run are random" in source


def test_the_front_page_says_how_h2o_did_against_recency(small_report: SmallReport) -> None:
    rows = pd.read_csv(small_report.folder / "policies.csv")
    rows = rows[(rows["selection"] == "head-shared") & (rows["start"] == "one-shot")]
    means = rows.pivot_table(index="budget", columns="policy", values="share_kept")
    points = [100 * (ours - theirs) for ours, theirs in zip(means["sum"], means["recency"], strict=True)]
    page = Page(small_report.folder / "index.html")
    text = " ".join("".join(page.text_in("main")).split())
    expected = f"the difference runs from {min(points):+.1f} to {max(points):+.1f} points"
    assert expected in text or "Fewer than 8 texts give no interval" in text
    assert len(page.all("img")) == 2
