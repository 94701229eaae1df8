"""The command `npurt`. Each command is a module that is imported when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from npubundle.errors import Error, ExitCode, ResourceError, os_failure
from npurt.cli import tables
from npurt.cli.options import PREFIX, Option, add_options, resolve
from npurt.errors import RuntimeFault, UsageError
from npurt.signals import Signals

DEBUG_VARIABLE = f"{PREFIX}DEBUG"

_EPILOG = """\
Every option can also come from a variable (NPURT_ and its name, such as NPURT_PROGRESS) or from
the file of --config (its name as the key, such as eval_every; paths are relative to the file).
A flag wins over the variable, the variable over the file.
"""


class InternalError(RuntimeFault):
    """A fault of the program itself."""

    code = "internal"
    exit_code = ExitCode.INTERNAL


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its module below `npurt.cli`, what it does, its options, and an example to copy."""

    module: str
    summary: str
    options: Mapping[str, Sequence[Option]]
    example: str
    positional: tuple[str, str] | None = None


COMMANDS = {
    "train": Command(
        "train",
        "Train an adapter with a bundle, the weights of a model, and data.",
        tables.TRAIN,
        "npurt train --bundle llama.npub --trust dev.pub --weights models/llama \\\n"
        "              --data train.jsonl --steps 400 --accum 4 --out ./adapter",
    ),
    "eval": Command(
        "evaluate",
        "Measure loss, perplexity and accuracy on data, of the base model or with an adapter.",
        tables.EVAL,
        "npurt eval --bundle llama.npub --trust dev.pub --weights models/llama \\\n"
        "             --data held.jsonl --adapter ./adapter",
    ),
    "check": Command(
        "check",
        "Compare the bundle's gradients with those of its unfused f32 reference program, tensor by tensor.",
        tables.CHECK,
        "npurt check --bundle llama.npub --trust dev.pub --weights models/llama --layers 2",
    ),
    "merge": Command(
        "merge",
        "Merge an adapter into the weights of its base model, and write a full model folder.",
        tables.MERGE,
        "npurt merge --weights models/llama --adapter ./adapter --out ./merged",
    ),
    "verify": Command(
        "verify",
        "Check a bundle's signatures against the trust policy, and every byte against its digest.",
        tables.VERIFY,
        "npurt verify llama.npub --trust dev.pub",
        positional=("bundle", "Bundle to verify: an .npub file or an OCI layout folder."),
    ),
    "doctor": Command(
        "doctor", "Say what this host has, and whether it can run bundles.", tables.DOCTOR, "npurt doctor"
    ),
}


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"{self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="npurt",
        usage="npurt [--help] [--version] COMMAND [OPTIONS]",
        description="Train language models with bundles that npucc compiled: no torch, no transformers, no compiler.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="Commands", parser_class=_Parser, prog="npurt"
    )
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            usage=f"npurt {name} [OPTIONS]{' BUNDLE' if command.positional else ''}",
            help=command.summary,
            description=command.summary,
            epilog=f"{_EPILOG}\nExample:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command.positional:
            sub.add_argument(command.positional[0], metavar=command.positional[0].upper(), help=command.positional[1])
        sub.add_argument("--config", metavar="FILE", help="TOML file with options.")
        add_options(sub, command.options)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; whatever a user can act on is one message on standard error."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    _prepare_streams()
    as_json = "--json" in words
    with Signals() as signals:
        try:
            code = _run(words, signals, as_json=as_json)
            signals.finish()
        except KeyboardInterrupt:
            signals.interrupted = True
        if signals.interrupted:
            code = int(signals.exit_code)
            print(json.dumps({"code": "interrupted", "exit_code": code}) if as_json else "interrupted", file=sys.stderr)
    return code


def _run(words: list[str], signals: Signals, *, as_json: bool) -> int:
    try:
        code = _run_words(words, signals)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FIXABLE)
    except Exception as caught:  # noqa: BLE001 -- the last resort: our fault becomes a message and an exit code
        signals.check()  # a library may have made this of the signal
        error = _as_error(caught)
        print(json.dumps(error.as_dict()) if as_json else error.render(), file=sys.stderr)
        return int(error.exit_code)
    return code


def _as_error(caught: Exception) -> Error:
    """What to tell of an exception: its own words if it is one of ours, else what they come down to."""
    match caught:
        case Error():
            return caught
        case OSError():
            return os_failure(caught, "go on")
        case MemoryError():
            return ResourceError("out of memory", remedy="npurt doctor   # says how much there is")
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(caught)
    hint = f"set {DEBUG_VARIABLE}=1 for the traceback, and report it"
    return InternalError(f"{type(caught).__name__}: {caught}", remedy=hint)


def _prepare_streams() -> None:
    """Closed streams swallow what is printed, and a narrow encoding replaces characters: neither is worth a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- open until the process ends
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run_words(words: list[str], signals: Signals) -> int:
    parser = build_parser()
    try:
        parsed, unknown = parser.parse_known_args(words)
    except SystemExit as request:  # --help
        return int(request.code or 0)
    given: dict[str, Any] = vars(parsed)
    name = given.pop("command")
    if given.pop("version"):
        from importlib.metadata import version

        print(f"npurt {version('npurt')}")
        return 0
    if name is None:
        parser.print_help(sys.stderr)
        return int(ExitCode.USAGE)
    return _run_command(name, given, unknown, signals)


def _run_command(name: str, given: dict[str, Any], unknown: list[str], signals: Signals) -> int:
    command = COMMANDS[name]
    options = [option for group in command.options.values() for option in group]
    if unknown:
        _refuse(unknown, options, f"npurt {name}")
    settings = resolve(options, given, config=given.pop("config", None))
    module = import_module(f"npurt.cli.{command.module}")
    positional = [given[command.positional[0]]] if command.positional else []
    code: int = module.run(settings, signals, *positional)
    return code


def _refuse(unknown: list[str], options: Sequence[Option], prog: str) -> NoReturn:
    flags = [option.flag for option in options] + ["--config", "--help"]
    first = next((word for word in unknown if word.startswith("-")), unknown[0])
    near = difflib.get_close_matches(first.partition("=")[0][:64], flags, n=1)
    hint = f"did you mean {near[0]}?  " if near else ""
    raise UsageError(f"unknown argument {first}", remedy=f"{hint}{prog} --help")
