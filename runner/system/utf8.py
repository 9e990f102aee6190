"""Text that can be written as UTF-8."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return `text` with an escape such as `\xff` for each byte that is not valid UTF-8, as in some file names.

    Python represents such bytes by surrogates, which UTF-8, JSON and TensorBoard's event files cannot contain.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # other surrogates, which come from no file name
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
