"""Functions that mask credentials of the forms in `_TABLE`, and escape characters, before a text is saved or shown."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
"""The text that replaces a credential. Overrides that contain it can still be parsed."""

_NAME = (
    r"(?P<name>passwords?|passwd|passphrase|secrets?|credentials?|authorization|connection[_-]?string"
    r"|(?:api|access|account|private|secret|signing|encryption)[_-]?key"
    r"|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token)"
)
"""A pattern for the end of a key that names a credential; `eos_token` and `num_tokens` are of a language model."""

_VALUE = r"""(?P<quote>["'])?(?P<secret>(?(quote)(?:(?!(?P=quote))[^\n])+|(?:\$\{[^{}\n]*\}|[^\s"',&)\]}]+)))"""

_TABLE = {
    "name=value, as in a query or a message": rf"(?i:{_NAME})=\\?{_VALUE}",
    # only before a quote or a number: an error may say "got '/etc/passwd': there is no such directory"
    '"name": value, as in JSON': rf"""(?i:{_NAME})["'] ?: ?(?=["'\d]){_VALUE}""",
    "a line of YAML": rf"(?im:^ *(?:- )?[\w.]{{0,100}}?{_NAME}: )(?!got )(?P<secret>[^\n]+)",
    "the same with a quoted name": (
        rf"""(?im:^ *(?:- )?(?P<mark>["'])[\w.]{{0,100}}?{_NAME}(?P=mark): )"""
        r"""(?!["'\d{\[])(?P<secret>[^\n]+?)(?m:(?=,?$))"""  # JSON has a comma at the end of the line
    ),
    "{name: value}, as in an override": rf"""(?i:[{{,] ?["']?[\w.]{{0,100}}?{_NAME}["']?): ?{_VALUE}""",
    "the message of a config error": rf"(?i:{_NAME}: got ){_VALUE}",
    "--name value, as on a command line": rf"(?i:(?<!\S)--[\w-]{{0,100}}?{_NAME}) {_VALUE}",
    "a header of HTTP": r"(?i:\bauthorization: ?|\bbearer (?=\S{16}))(?P<secret>[^\n\"']+)",
    "user:password@ in a URL": r"(?<=://)[^\s/@:?#]*:(?P<secret>[^\s/?#]+)@",
    "token@ in a URL; a user name is shorter": r"(?<=://)(?P<secret>[^\s/@:?#]{20,})@",
    "the signature of a URL of a cloud": r"(?i:[?&](?:x-(?:amz|goog)-)?sig(?:nature)?=)(?P<secret>[\w%+/=-]+)",
    "a password in an ODBC connection": r"(?i:;\s?pwd=)(?P<secret>[^\s;\"']+)",
    "Hugging Face": r"\b(?P<secret>hf_[A-Za-z0-9]{20,})",
    "GitHub": r"\b(?P<secret>gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "GitLab": r"\b(?P<secret>glpat-[\w-]{16,})",
    # one part of 16 characters: sk-learn-digits-classification is a name
    "OpenAI, Anthropic": r"(?<![\w-])(?P<secret>sk-[\w-]*?\w{16}[\w-]*)",
    "AWS": r"\b(?P<secret>A(?:KIA|SIA)[A-Z0-9]{16})\b",
    "Google": r"\b(?P<secret>AIza[\w-]{35})",
    "Slack": r"\b(?P<secret>xox[abeoprs]-[\w-]{10,})",
    # the lookahead examines each word only once: without it, eyJ-eyJ-eyJ-… would take quadratic time
    "a JSON Web Token": r"(?<![\w-])(?=[\w-]+\.eyJ[\w-]{8,}\.)[\w-]*?\b(?P<secret>eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)",
    "a private key": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?P<secret>.*?)(?:-----END|\Z)",
}
"""Patterns for credentials, by their context or issuer. The group `secret` matches the credential, `name` its name."""

_MARKS = (
    *("pass", "secret", "credential", "authorization", "bearer", "connection", "key", "token", "sig", "pwd", "://"),
    *("hf_", "gh", "glpat", "sk-", "akia", "asia", "aiza", "xox", "eyj"),
)
"""Every match of `_TABLE`, in lowercase, contains one of these strings: most texts need not be searched further."""

_PATTERNS = tuple(re.compile(pattern, re.DOTALL) for pattern in _TABLE.values())
_OVERRIDE = re.compile(rf"(?i:[+~]*[^\s=]{{0,200}}?{_NAME}=)(?P<secret>.+)", re.DOTALL)
_NAMED = re.compile(rf"(?i:{_NAME})\Z")
_NO_SECRET = re.compile(r"(?:(?i:null|none|true|false)|\?\?\?|\$\{[^{}]*\}|\*+|)(?: +#[^\n]*)?")
"""A pattern for values that are no secrets even if their key is `password`, such as a reference `${oc.env:TOKEN}`."""


def redacted(text: str) -> str:
    """Return `text` with credentials replaced by `***`."""
    lower = text.lower()
    if any(mark in lower for mark in _MARKS):
        for pattern in _PATTERNS:
            text = pattern.sub(_masked, text)
    return text


def names_a_secret(name: str) -> bool:
    """Return whether the name of a key or of an environment variable is that of a credential."""
    return bool(_NAMED.search(name))


def redacted_values(config: Any, key: str = "") -> Any:
    """Return a copy of plain values nested in dicts and lists, or of a list of overrides, without credentials.

    If `key`, that of `config` in the dict around it, names a credential, all values nested in `config` are credentials.
    """
    hidden = _NAMED.search(key)
    if isinstance(config, dict):
        return {name: redacted_values(value, key if hidden else str(name)) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return [redacted_values(value, key) for value in config]
    if hidden and config is not None and _is_secret(hidden["name"], str(config)):
        return MASK
    if not isinstance(config, str):
        return config
    override = _OVERRIDE.fullmatch(config)
    return _masked(override) if override else redacted(config)


def _masked(match: re.Match[str]) -> str:
    name = match.groupdict().get("name") or ""
    if not _is_secret(name, match["secret"]):
        return match[0]
    start, end = (position - match.start() for position in match.span("secret"))
    return match[0][:start] + MASK + match[0][end:]


def _is_secret(name: str, value: str) -> bool:
    """Return whether `value` of a key that ends with `name` is a credential. The number of a `token` is none."""
    return not _NO_SECRET.fullmatch(value) and not (name.lower() == "token" and value.isdecimal())


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
