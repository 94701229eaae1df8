"""The command `npucc`. Each command is a module; torch is imported inside commands, so that `--help` is instant."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from pathlib import Path

import typer

from npubundle.errors import Error, ExitCode
from npucc import signals
from npucc.cli import build, diagnose, inspect, keygen, plan, tune, verify
from npucc.cli.options import version_option
from npucc.errors import InternalError, ResourceError, UsageError

DEBUG_VARIABLE = "NPUCC_DEBUG"

app = typer.Typer(
    name="npucc",
    help="Compile a model and a training recipe into a signed bundle that npurt trains with.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"max_content_width": 100},
)
app.callback()(version_option)
app.command("build")(build.build)
app.command("plan")(plan.plan)
app.command("diagnose")(diagnose.diagnose)
app.command("tune")(tune.tune)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("keygen")(keygen.keygen)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; every error a user can act on is one message on standard error.

    Signals are heeded where the process has installed `npucc.signals`.
    """
    _prepare_streams()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(words)
        signals.finish()
    except (KeyboardInterrupt, typer.Abort):
        code = int(ExitCode.INTERRUPTED)
    code = signals.exit_code(code)
    if code in {ExitCode.INTERRUPTED, ExitCode.TERMINATED}:
        as_json = "--json" in words
        print(json.dumps({"code": "interrupted", "exit_code": code}) if as_json else "interrupted", file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    try:
        signals.check()
        code = app(args=words, prog_name="npucc", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as request:
        return int(request.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FIXABLE)
    except Exception as failure:  # noqa: BLE001 -- the last resort: a fault of ours becomes a message and an exit code
        signals.check()  # a library may have made this of the signal
        return _report(_as_error(failure), words)
    return code if isinstance(code, int) else 0


def _prepare_streams() -> None:
    """Closed streams (`>&-`) swallow what is printed, and a narrow encoding replaces characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- open until the process ends
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(failure: Error, words: list[str]) -> int:
    text = json.dumps(failure.as_dict()) if "--json" in words else failure.render()
    print(text, file=sys.stderr)
    return int(failure.exit_code)


def _as_error(failure: Exception) -> Error:
    """What a user should read of a failure."""
    if isinstance(failure, Error):
        return failure
    if isinstance(failure, typer.TyperException):
        context = getattr(failure, "ctx", None)
        command = context.command_path if context else "npucc"
        return UsageError(failure.format_message(), remedy=f"{command} --help")
    if isinstance(failure, OSError):
        return _from_system(failure)
    if isinstance(failure, MemoryError):
        return ResourceError("out of memory", remedy="use a host with more memory")
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(failure)
    what = f"{type(failure).__name__}: {failure}"
    return InternalError(what, remedy=f"set {DEBUG_VARIABLE}=1 for a traceback, and report it")


def _from_system(failure: OSError) -> Error:
    where = str(failure.filename) if failure.filename else None
    if failure.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ResourceError(
            "the disk is full; nothing was changed", where=where, remedy="free some space and run it again"
        )
    return ResourceError(failure.strerror or str(failure), where=where)
