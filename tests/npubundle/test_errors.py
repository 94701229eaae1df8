from __future__ import annotations

from pathlib import Path

import pytest

from npubundle.blob import open_regular
from npubundle.errors import Error, FileError, Problem


def test_control_characters_are_shown_and_not_sent_to_the_terminal() -> None:
    error = Error("no \x1b[31m way", where="a\rb", problems=[Problem("k\x9b", "\x00\ttab")], remedy="é stays")
    assert error.render() == (
        "error[error]: no \\x1b[31m way\n  where: a\\x0db\n  - k\\x9b: \\x00\ttab\n  hint: é stays"
    )


def test_a_path_with_nul_is_a_file_error() -> None:
    with pytest.raises(FileError, match="NUL"):
        open_regular(Path("a\0b"))
