"""One report from start to end: check what can be checked, run the notebooks, render, keep the manifest true."""

from __future__ import annotations

from helpers.checkpoint import Checkpoint
from helpers.comparison import check_comparison
from helpers.errors import InputError
from helpers.inputs import check_input, read_texts
from helpers.layer import check_attention
from helpers.memory import check_capture_fits
from helpers.parameters import Parameters
from helpers.paths import NOTEBOOKS, scrub_message
from helpers.reports import INDEX_PAGE, execute, render, write_index
from helpers.runs import MADE_BY, NEEDS, REPORT, Run


def run_report(parameters: Parameters, notebooks: list[str]) -> None:
    """Run ``notebooks`` (file names without .ipynb) with ``parameters`` and render the report into the run folder.

    Raises:
        InputError: something is refused, before any kernel starts where that can be known.
        NotebookError: a notebook failed; the manifest says ``failed`` and why.
    """
    run = Run.of(parameters)
    with run.locked():
        _run_locked(run, parameters, notebooks)
    print(f"Report: {run.folder / INDEX_PAGE}")


def _run_locked(run: Run, parameters: Parameters, notebooks: list[str]) -> None:
    try:
        check(parameters)
        if NOTEBOOKS["04"] in notebooks:
            check_comparison(parameters)
            read_texts(parameters.text)
        for notebook in notebooks:
            if notebook in NEEDS and MADE_BY[NEEDS[notebook]] not in notebooks:
                run.check_needs(parameters, notebook)
    except InputError as error:
        run.refuse(parameters.portable(), scrub_message(str(error), parameters.paths()))
        raise
    run.begin(parameters, [*notebooks, REPORT])
    try:
        for notebook in notebooks:
            executed = execute(parameters, parameters.values(), notebook)
            run.step = notebook
            render(run, executed, notebook)
        run.start_step(REPORT)
        write_index(run)
        run.finish_step()
    except KeyboardInterrupt:
        run.stop("interrupted", "interrupted by the user")
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        run.stop("failed", scrub_message(reason, parameters.paths()))
        raise


def check(parameters: Parameters) -> None:
    """Refuse, from headers and configuration alone, what the notebooks would refuse later.

    Raises:
        InputError: a checkpoint, layer, input or device that the run can't use.
    """
    ckpt = Checkpoint.open(parameters.checkpoint)
    dtype, device = parameters.torch_dtype(), parameters.torch_device()
    attention = check_attention(ckpt, parameters.layer)
    check_input(parameters, ckpt, dtype, device)
    n_tokens = parameters.seq_len + parameters.continuation
    weights = sum(tensor.numel() for tensor in attention.state_dict().values()) * dtype.itemsize
    hidden_states = n_tokens * ckpt.config.hidden_size * (4 + dtype.itemsize)  # drawn in float32
    check_capture_fits(
        attention, ckpt.config.num_attention_heads, 1, n_tokens, dtype, device, besides=weights + hidden_states
    )
