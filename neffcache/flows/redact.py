"""Redaction: text without secrets and without names of people and hosts, for what leaves a machine in a support bundle.

Two nets. Values that this machine is known to hold (secret variables, credential files, the home directory, the user,
the host) are replaced wherever they stand, also quoted for URLs and JSON. Everything else is judged by its shape. In
doubt a text is taken for a secret; hexadecimal digests of 32 and 64 digits are kept, because they name keys and blobs.
"""

from __future__ import annotations

import base64
import configparser
import itertools
import json
import os
import pwd
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

REMOVED, SET = "<removed>", "<set>"

SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|passwd|pwd\b|_pwd|credential|api[_-]?key|access[_-]?key|private[_-]?key|signing|"
    r"auth|cookie|session|signature|bearer|\bsas\b|_sas|dsn|webhook|(?:^|[_-])(?:key|pat|pass|psk|jwt)(?:$|[_-])",
    re.IGNORECASE,
)
"""A variable, a JSON field or the left side of an assignment whose value is not shown."""

PUBLIC_NAMES = frozenset(
    {
        *("cache_key", "compile_key", "kms_key", "require_signature", "conditional_writes", "locations_in_key"),
        *("version_in_key", "token_count", "signatures"),
    }
)
"""Names of ours that sound like a secret and are none."""

NOTHING = frozenset({"", REMOVED, "None", "null", "true", "false", "True", "False"})
"""Values that say nothing."""

SHORTEST = 6
"""Characters that a known value must have to be replaced wherever it stands: shorter ones are words."""

_AWS_ID = r"(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA|ABIA|ACCA|APKA|ASCA)[A-Z0-9]{8,}"

_PATTERNS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    # A key whose beginning or end was cut off by the length of a log is still a key.
    (
        "private key",
        re.compile(r"-----BEGIN [^-\n]{1,60}-----.*?(?:-----END [^-\n]{1,60}-----|\Z)", re.DOTALL),
        "<private key>",
    ),
    (
        "cut key",
        re.compile(r"(?:\A|(?<=left out \.\.\.\]))(?:[A-Za-z0-9+/=\s\\]|\\n)*-----END [^-\n]{1,60}-----"),
        "<private key>",
    ),
    ("putty key", re.compile(r"PuTTY-User-Key-File.*", re.DOTALL), "<private key>"),
    (
        "header",
        re.compile(
            r"(?P<kept>\b(?:proxy-)?authorization|\bx-amz-security-token|\b(?:set-)?cookie|\bx-api-key|\bx-auth-token|"
            r"pass(?:word|wd|phrase)[A-Za-z0-9_-]{0,60})"
            r"(?P<between>[\"']?\s*[:=]\s*)[^\r\n]+",
            re.IGNORECASE,
        ),
        r"\g<kept>\g<between><removed>",
    ),
    (
        "scheme",
        re.compile(r"\b(?P<kept>bearer|basic|negotiate|digest)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE),
        r"\g<kept> <removed>",
    ),
    (
        "userinfo",
        re.compile(r"(?P<kept>\b[a-z][a-z0-9+.-]{0,20}:(?:\\?/){2})[^\s\"'<>]*@", re.IGNORECASE),
        r"\g<kept><removed>@",
    ),
    (
        "query",
        re.compile(r"(?P<kept>\b[a-z][a-z0-9+.-]{0,20}:(?:\\?/){2}[^\s\"'<>?#]*)[?#][^\s\"'<>]*", re.IGNORECASE),
        r"\g<kept>?<removed>",
    ),
    (
        "signed",
        re.compile(r"\b(?P<kept>X-Amz-[A-Za-z-]+|AWSAccessKeyId|Signature|sig|se|sp|sv)=[^\s&\"'<>]+"),
        r"\g<kept>=<removed>",
    ),
    ("aws id", re.compile(rf"(?<![A-Z0-9]){_AWS_ID}"), "<AWS key id>"),
    ("arn", re.compile(r"(?P<kept>\barn:aws[a-z-]*:[a-z0-9-]*:[a-z0-9-]*:)\d{12}(?=:)"), r"\g<kept><account>"),
    ("jwt", re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]*)?"), REMOVED),
    (
        "token",
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_|api_org_|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|sk-|sk_live_|rk_live_|pypi-|"
            r"npm_|dop_v1_|AIza|ya29\.|nvapi-|wandb_v1_|lin_api_|SG\.|AGE-SECRET-KEY-)[A-Za-z0-9._=-]{8,}"
        ),
        REMOVED,
    ),
    (
        "email",
        re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,100}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}"),
        "<email>",
    ),
    ("home", re.compile(r"(?P<kept>(?:/home|/Users|/fsx/home|/mnt/home)/)[^/\s\"':;,]+"), r"\g<kept><user>"),
    ("ec2 host", re.compile(r"\bip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}(?:\.[a-z0-9.-]+)?"), "<host>"),
)
# The value may be a quoted string with spaces, or a word. Every repetition has a bound or a place where it must begin:
# a log may hold a word of a million letters.
_NAME = re.compile(r"(?<![A-Za-z0-9_])([A-Za-z0-9_][A-Za-z0-9_.-]{0,100})(?:\\?[\"'])?\s{0,9}(?:=>|[:=])\s{0,9}")
_VALUE = re.compile(r"\\?\"(?:[^\"\\\n]|\\[^\n])*\\?\"|'[^'\n]*'|[^\s,;&\"'}\])]+")
_OPTION = re.compile(r"(?<![A-Za-z0-9_-])(--?[A-Za-z][A-Za-z0-9_-]{0,60})[ \t]{1,9}(?!-)")
_OPAQUE = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{20,}={0,2}(?![A-Za-z0-9+/_=-])")
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_KEPT_HEX = frozenset({8, 12, 16, 32, 64})


def is_secret_name(name: str) -> bool:
    return name.lower() not in PUBLIC_NAMES and SECRET_NAME.search(name) is not None


@dataclass
class Redactor:
    """`known` maps an exact text to what stands in its place. Use `of_host`."""

    known: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    """Names, replaced only where they stand as words of their own."""
    home: str = ""

    @classmethod
    def of_host(cls, environ: Mapping[str, str]) -> Redactor:
        """With everything that this process can know to be secret or personal here."""
        made = cls()
        for secret in _secrets(environ):
            made.learn(secret)
        home = environ.get("HOME") or os.path.expanduser("~")
        made.home = home.rstrip("/")
        for user in {environ.get("USER", ""), environ.get("LOGNAME", ""), _user()} - {"", "root"}:
            made.words[user] = "<user>"
        for host in {environ.get("HOSTNAME", ""), socket.gethostname(), os.uname().nodename} - {"", "localhost"}:
            made.words |= {host: "<host>", host.partition(".")[0]: "<host>"}
        return made

    def learn(self, secret: str) -> None:
        """Remove this value from now on, as it is and as URLs, JSON and base64 write it."""
        # As it is too: without its blanks it may be too short to be told from a word.
        for line in {secret, secret.strip(), *secret.strip().splitlines()} if secret.strip() else ():
            if len(line) >= SHORTEST and line not in "<removed> <private key> <AWS key id> <account> <email>":
                data = line.encode(errors="surrogateescape")
                for form in (line, quote(line, safe="", errors="replace"), quote_plus(line, errors="replace"),
                             json.dumps(line)[1:-1], base64.b64encode(data).decode()):  # fmt: skip
                    self.known[form] = REMOVED

    def text(self, text: str) -> str:
        """The text without what must not leave."""
        for form in sorted(self.known, key=len, reverse=True):
            text = text.replace(form, self.known[form])
        if self.home:  # before what is in its name looks drawn by chance
            text = re.sub(rf"(?<![\w.-]){re.escape(self.home)}(?![\w.-])", "~", text)
        for _, pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        text = _unassigned(_unassigned(text, _NAME), _OPTION)
        text = _OPAQUE.sub(lambda match: REMOVED if _opaque(match[0]) else match[0], text)
        for word in sorted(self.words, key=len, reverse=True):
            if len(word) > 1:
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", self.words[word], text)
        return text

    def json(self, value: Any) -> Any:
        """A JSON value with every string and every field's name redacted; what a secret name holds goes whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            shown = {}
            for name, inner in value.items():
                plain = inner is None or isinstance(inner, (bool, Mapping, list, tuple))
                hidden = is_secret_name(str(name)) and not plain and inner not in ("", SET)
                shown[self.text(str(name))] = REMOVED if hidden else self.json(inner)
            return shown
        if isinstance(value, (list, tuple)):
            return [self.json(item) for item in value]
        return value

    def leaks(self, data: str) -> bool:
        """Whether a known secret stands in a text that should have none."""
        return any(form in data for form, instead in self.known.items() if instead == REMOVED)


def _unassigned(text: str, before: re.Pattern[str]) -> str:
    """The text without the values that follow a secret name; `before` is what stands in front of a value."""
    parts, done, at = [], 0, 0
    while (match := before.search(text, at)) is not None:
        at = match.end()
        value = _VALUE.match(text, at) if is_secret_name(match[1]) else None
        if value is not None and value[0].strip("\\\"'") not in NOTHING:
            quote_mark = value[0][: len(value[0]) - len(value[0].lstrip("\\\"'"))]
            parts += [text[done:at], quote_mark, REMOVED, quote_mark]
            done = at = value.end()
    return "".join([*parts, text[done:]])


def _opaque(word: str) -> bool:
    """Whether a long word looks drawn by chance: mixed cases and digits, or a hexadecimal that is no digest of ours."""
    body = word.rstrip("=")
    if _HEX.fullmatch(body):
        return len(body) not in _KEPT_HEX and len(body) >= 32
    kinds = [any(test(letter) for letter in body) for test in (str.islower, str.isupper, str.isdigit)]
    if len(body) < 20 or not all(kinds):
        return False
    # Names are made of runs; of a random word every other letter changes its kind.
    changes = sum(_kind(a) != _kind(b) for a, b in itertools.pairwise(body))
    return changes / len(body) > 0.3


def _kind(letter: str) -> int:
    return 0 if letter.islower() else 1 if letter.isupper() else 2 if letter.isdigit() else 3


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    """What the environment and the usual files of credentials hold."""
    for name, value in environ.items():
        if is_secret_name(name):
            yield value
        yield from _in_url(value)
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    for path in (environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials",
                 environ.get("AWS_CONFIG_FILE") or home / ".aws/config"):  # fmt: skip
        yield from _of_sections(_read(Path(path)))
    yield _read(Path(environ.get("HF_HOME") or home / ".cache/huggingface") / "token")
    words = _read(home / ".netrc").split()
    yield from (word for before, word in itertools.pairwise(words) if before in ("password", "account"))


def _in_url(value: str) -> Iterator[str]:
    """The password of a URL, and its user and password together."""
    for found in re.finditer(r"://([^\s\"'<>]*)@", value):
        yield found[1]
        password = found[1].partition(":")[2]
        yield password
        yield unquote(password)


def _of_sections(text: str) -> Iterable[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return [line.partition("=")[2] for line in text.splitlines() if is_secret_name(line.partition("=")[0])]
    return [value for name in parser for key, value in parser[name].items() if is_secret_name(key) and value]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:100_000]
    except OSError:
        return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
