"""Print the reference page of the command `npurt`, made from its own help: `docs/reference/npurt-cli.md`.

python tools/npurt_reference.py > docs/reference/npurt-cli.md
"""

from __future__ import annotations

import argparse
import os

from npurt.cli import COMMANDS, build_parser

_WIDTH = "100"
_HEAD = """\
# The command `npurt`

Made from the command's own help by `tools/npurt_reference.py`. A training from end to end is in
[Train an adapter](../how-to/train.md); [exit codes](exit-codes.md) and [variables](environment-variables.md) have
pages of their own.

Standard output carries results only; progress, warnings and errors go to standard error. With `--json`, results are
JSON objects, one on each line, and so are errors. An error says what went wrong, where, and what to do about it:

    error[file]: the folder for the adapter holds other files: config.json
      where: models/llama
      hint: name a new or empty folder, such as models/llama-2
"""


def page() -> str:
    """The page as it should be."""
    os.environ["COLUMNS"] = _WIDTH  # argparse wraps to it
    parser = build_parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]  # noqa: SLF001
    sections = [_HEAD, _block("npurt", parser)]
    sections += [_block(f"npurt {name}", commands.choices[name]) for name in COMMANDS]
    return "\n".join(sections)


def _block(title: str, parser: argparse.ArgumentParser) -> str:
    return f"## {title}\n\n```text\n{parser.format_help().rstrip()}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
