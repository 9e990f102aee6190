"""Text that can be written as UTF-8."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return `text` with `\xff` for each byte of a file name that is not UTF-8.

    Python represents such bytes by surrogates, which neither UTF-8 nor JSON nor TensorBoard's events can hold.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # other surrogates, which come from no file name
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
