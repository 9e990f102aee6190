"""Conversion of any text to text that can be encoded as UTF-8 and safely shown on a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""A pattern for characters that control a terminal, except tab and line feed, or that change the text direction."""


def printable(text: str) -> str:
    r"""Return `text` with each byte that is not valid UTF-8 replaced by an escape sequence such as `\xff`.

    Such bytes occur in some file names. Python represents them as surrogates, which neither UTF-8 nor JSON nor
    TensorBoard's event files can contain. Control characters are escaped too: a terminal would execute them, and
    somebody else may have chosen the text, for example a file name.
    """
    try:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # other surrogates, which come from no file name
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)
