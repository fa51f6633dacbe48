"""Running notebooks headlessly and turning them into pages that stand alone: no script, no remote reference."""

from __future__ import annotations

import base64
import json
import logging
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import pandas as pd
import papermill
import psutil
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from papermill.exceptions import PapermillExecutionError
from pygments.formatters import HtmlFormatter

from helpers.comparison import by_text
from helpers.errors import InputError, NotebookError
from helpers.parameters import Parameters
from helpers.paths import NOTEBOOKS, project_root, scrub
from helpers.runs import MANIFEST, REPORT, Run
from helpers.summary import comparison, explained, headline
from helpers.verdict import verdicts, who_leads

TEMPLATES = Path(__file__).with_name("report")
INDEX_PAGE = "index.html"
CONTENTS = {  # the files of a run that aren't pages or figures
    "eviction.csv": "each token's score and category, and whether it is kept",
    "scores.csv": "each token's scores, the queries that see it, and what the null gives it",
    "heavy_tails.csv": "how heavy the scores' tail is, beside the null and random weights",
    "policies.csv": "each text, policy and budget: what it keeps of the held-out mass, and its output error",
    "summary.json": "the figures above by name, unrounded",
    MANIFEST: "parameters, tensors read, versions, times, peak memory",
}


def execute(parameters: Parameters, values: dict[str, Any], notebook: str) -> nbformat.NotebookNode:
    """Run one notebook in a kernel of its own, with a progress bar; ``values`` are what the user set.

    No absolute path is left in what comes back: a report is mailed.

    Raises:
        InputError: the notebook refused its input.
        NotebookError: it failed otherwise, or its kernel died.
    """
    # In a thread of its own, where nbclient can't take the handlers of signals away from the command line.
    with ThreadPoolExecutor(max_workers=1) as thread:
        execution = thread.submit(
            papermill.execute_notebook,
            project_root() / "notebooks" / f"{notebook}.ipynb",
            None,
            parameters=values,
            kernel_name="python3",
            cwd=Path.cwd(),  # relative paths mean the same there as here
            coalesce_streams=True,  # of a progress line that rewrites itself, the end is kept
            # no advice about transports between the progress bars, nor the interrupt that every kernel ends with
            extra_arguments=["--IPKernelApp.log_level=50"],
            progress_bar={
                "desc": notebook,
                "bar_format": "{desc}: {percentage:3.0f}%|{bar:30}| {n_fmt}/{total_fmt} cells",
            },
        )
        try:
            executed = execution.result()
        except PapermillExecutionError as error:
            if error.ename == InputError.__name__:
                raise InputError(error.evalue) from None
            if error.ename in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in error.evalue:
                raise NotebookError(f"{notebook} ran out of memory: lower seq_len, or free memory.") from None
            raise NotebookError(f"{notebook} failed with {error.ename}: {error.evalue}\n{error}") from None
        except DeadKernelError:
            raise NotebookError(
                f"The kernel of {notebook} died, most likely for lack of memory: lower seq_len, or free memory."
            ) from None
        except KeyboardInterrupt:
            logging.getLogger("papermill").disabled = True  # that its kernel died is no news
            while not execution.done():  # the kernel may be about to start only now
                with suppress(KeyboardInterrupt):  # a second one would leave the rest of the notebook to run on
                    _end_kernels()
                    wait([execution], timeout=0.2)
            raise
    scrubbed: nbformat.NotebookNode = nbformat.from_dict(_scrub_texts(executed, parameters.paths()))
    return scrubbed


def _scrub_texts(value: Any, paths: list[Path]) -> Any:
    """Scrub every text of a notebook; a picture in base64 can hold the letters of a short folder by chance."""
    if isinstance(value, dict):
        pictures = {key: part for key, part in value.items() if key == "image/png" and isinstance(part, str)}
        return {key: _scrub_texts(part, paths) for key, part in value.items()} | pictures
    if isinstance(value, list):
        return [_scrub_texts(part, paths) for part in value]
    return scrub(value, paths) if isinstance(value, str) else value


def _end_kernels() -> None:
    """End the kernels of this process: without its kernel, papermill ends too."""
    kernels = [child for child in psutil.Process().children() if _is_kernel(child)]
    for kernel in kernels:
        kernel.kill()
    psutil.wait_procs(kernels, timeout=10)


def _is_kernel(process: psutil.Process) -> bool:
    try:
        return "ipykernel_launcher" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended already
        return False


def render(run: Run, executed: nbformat.NotebookNode, notebook: str) -> None:
    """Write the executed notebook as ``<notebook>.html`` of the run."""
    exporter = HTMLExporter(
        template_name=TEMPLATES.name, extra_template_basedirs=[str(TEMPLATES.parent)], exclude_anchor_links=True
    )
    page = _page(run, _label(notebook), f"{notebook}.html")
    html, _ = exporter.from_notebook_node(executed, resources={"page": page})
    run.write_text(f"{notebook}.html", html)


def write_index(run: Run) -> None:
    """Write the run's front page, ``index.html``: headline, the demo's figures beside the null's, and all its files."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined)
    parameters = run.manifest["parameters"]
    title = f"H2O on layer {parameters['layer']} of {Path(parameters['checkpoint']).name}"
    findings = verdict = None
    if (run.folder / "summary.json").exists():
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        findings = {
            "headline": headline(summary),
            "explained": explained(summary),
            "comparison": comparison(summary),
            "picture": _picture(run, "score_by_category"),
        }
    written = run.manifest["artefacts"]
    if "policies.csv" in written:
        texts = by_text(pd.read_csv(run.folder / "policies.csv"))
        sentences = [*verdicts(texts, "share_kept"), who_leads(texts, "share_kept", "keeping held-out mass")]
        verdict = {
            "sentences": [markdown2html(sentence) for sentence in sentences],
            "picture": _picture(run, "policies_share_kept"),
        }
    html = environment.get_template("run.html.j2").render(
        page=_page(run, title, INDEX_PAGE),
        findings=findings,
        verdict=verdict,
        files={name: CONTENTS[name] for name in CONTENTS if name in written or name == MANIFEST},
        figures=sorted({Path(name).stem for name in written if name.startswith("figures/")}),
    )
    run.write_text(INDEX_PAGE, html)


def _picture(run: Run, name: str) -> str:
    return base64.b64encode((run.folder / f"figures/{name}.png").read_bytes()).decode()


def _page(run: Run, title: str, name: str) -> dict[str, Any]:
    manifest = run.manifest
    pages = [(INDEX_PAGE, "Overview")] if REPORT in manifest["steps"] else []
    pages += [(f"{name}.html", _label(name)) for name in NOTEBOOKS.values() if name in manifest["steps"]]
    light, dark = HtmlFormatter(style="default"), HtmlFormatter(style="github-dark")
    css = "\n".join(
        [
            (TEMPLATES / "style.css").read_text(),
            light.get_style_defs(".highlight"),
            f"@media screen and (prefers-color-scheme: dark) {{\n{dark.get_style_defs('.highlight')}\n}}",
            ".highlight, .highlight pre { background: var(--tint) }",
        ]
    )
    return {
        "title": title,
        "css": css,
        "run": run.name,
        "links": [{"href": href, "title": label, "current": href == name} for href, label in pages],
        "origin": manifest["checkpoint"]["origin"],
        "parameters": manifest["parameters"],
    }


def _label(notebook: str) -> str:
    return notebook.replace("_", " ")
