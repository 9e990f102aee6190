"""Text that can be written as UTF-8, and shown on a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that control a terminal, except tab and line feed, or that change the direction of the text."""


def printable(text: str) -> str:
    r"""Return `text` with an escape such as `\xff` for each byte that is not valid UTF-8, as in some file names.

    Python represents such bytes by surrogates, which UTF-8, JSON and TensorBoard's event files cannot contain. Control
    characters are escaped too, because a terminal would execute them: a file name may come from somebody else.
    """
    try:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # other surrogates, which come from no file name
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)
