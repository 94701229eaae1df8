"""Print the reference page of the command `npucc`, made from its own help: `docs/reference/npucc-cli.md`.

python tools/npucc_reference.py > docs/reference/npucc-cli.md
"""

from __future__ import annotations

import contextlib
import io
import os

from npucc.cli import app, main

_HEAD = """\
# The command `npucc`

Made from the command's own help by `tools/npucc_reference.py`. A build from end to end is in
[Build a bundle](../how-to/build.md); [recipe files](recipe.md), the [part cache](part-cache.md),
[exit codes](exit-codes.md) and [variables](environment-variables.md) have pages of their own.

Standard output carries results only: with `--json` one JSON object, else lines for people. Progress, warnings and
errors go to standard error; with `--json` an error is a JSON object as well. It says what went wrong, where, and what
to do about it, and a model or recipe with several faults is refused with all of them:

    error[unsupported-model]: this model cannot be compiled
      where: models/other/config.json
      - model_type: 'qwen2' is not a supported architecture; supported are llama, mistral
      - attention_bias: changes the mathematics: True is not supported, only False
      hint: a key that is known to change nothing can be passed over with --ignore-config-key NAME

Nothing asks a question, and nothing uses the network but `--model ORG/NAME`, which fetches one `config.json`.
"""


def page() -> str:
    """The page as it should be."""
    names = [command.name for command in app.registered_commands if command.name]
    return "\n".join([_HEAD, _block("npucc"), *(_block("npucc", name) for name in names)])


def _block(*words: str) -> str:
    os.environ["COLUMNS"] = "100"  # typer wraps to it, and to 80 at most
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main([*words[1:], "--help"])
    return f"## {' '.join(words)}\n\n```text\n{shown.getvalue().strip()}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
