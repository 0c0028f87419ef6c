"""Text that may be shown to anybody: without names of this machine and of its users, and without what opens a door."""

from __future__ import annotations

import getpass
import re
import socket
from contextlib import suppress
from pathlib import Path

_MASK = "***"
_WORD = (
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|RENDEZVOUS_ADDR"
    r"|(?:API|ACCESS|PRIVATE|SECRET|ACCOUNT)[_-]?KEY)"
)
_SECRETS = (
    (re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL), _MASK),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]+", re.IGNORECASE), rf"\1 {_MASK}"),
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE), rf"\1{_MASK}@"),
    (
        # NAME=value, "name": "value", --name value
        re.compile(
            rf"((?:--[\w-]*{_WORD}\s|\b[\w.-]*{_WORD}(?:_\w+)?[\"']?\s*[=:])\s*)(\"[^\"]*\"|'[^']*'|[^\s\"',;&]+)",
            re.IGNORECASE,
        ),
        rf"\1{_MASK}",
    ),
    # by their looks: of Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, Google, JSON Web Tokens; and any long key
    (re.compile(r"\b(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|ASIA|AIza|eyJ)[\w.-]{10,}"), _MASK),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), _MASK),
)


def without_secrets(text: str) -> str:
    """A text without passwords, tokens, keys, and the user of an address such as ``https://user:password@host``."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def variable(name: str, value: str) -> str:
    """The value of an environment variable, masked where its name or its looks say that it is a secret."""
    return without_secrets(f"{name}={value}").partition("=")[2]


def without_names(text: str) -> str:
    """A report without secrets, and without the names of this machine and of users, whose directories bear them."""
    text, host = without_secrets(text), socket.gethostname()
    for known in (host, host.partition(".")[0]):
        text = re.sub(rf"\b{re.escape(known)}\b", "HOST", text)
    with suppress(RuntimeError):  # a user without a home
        text = re.sub(rf"{re.escape(str(Path.home()))}(?![\w.-])", "~", text)
    text = re.sub(r"(/home/|/Users/)[^/\s:'\"]+", r"\1USER", text)
    with suppress(OSError, KeyError):  # a user without a name
        user = re.escape(getpass.getuser())
        text = re.sub(rf"(?<=/){user}(?![A-Za-z0-9])|\b{user}(?=@)", "USER", text)
    return text
