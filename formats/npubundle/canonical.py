"""Canonical JSON (RFC 8785): one value, one sequence of bytes, so that documents can be hashed, signed and compared.

Every document that npubundle writes passes through `encode`. Numbers are IEEE doubles: 2.0 and 2 are both written `2`,
and integers that a double cannot hold exactly are refused.
"""

from __future__ import annotations

from typing import Any

import rfc8785

from npubundle.errors import FormatError

MAX_INTEGER = 2**53 - 1


def encode(value: Any) -> bytes:
    """Write a value of dicts, lists, tuples, text, numbers, booleans and None as canonical JSON.

    Raises `FormatError` for what has no canonical form: NaN, infinities, integers beyond ±(2^53 - 1), keys that are not
    text, text that is not valid Unicode, and other types.
    """
    try:
        return rfc8785.dumps(value)
    except rfc8785.IntegerDomainError as error:
        raise FormatError(
            "cannot write an integer beyond ±(2^53 - 1) as canonical JSON", remedy="store it as text"
        ) from error
    except rfc8785.FloatDomainError as error:
        raise FormatError(f"cannot write a number that is not finite as canonical JSON: {error}") from error
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise FormatError(f"cannot write this as canonical JSON: {error}") from error
