"""Compiler options in one canonical form: `NEURON_CC_FLAGS` and `--option`, as `neuronx-cc` understands them.

One meaning has one form, and two meanings never share one. Where the documentation does not settle whether two texts
mean the same, they stay two: a needless miss costs a compile, a false hit trains with the wrong program.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from neffcache.errors import Usage
from neffcache.key.option_table import (
    AUTO_CAST,
    AUTO_CAST_TYPE,
    DEFAULT_OPTLEVEL,
    DEPRECATED_O1,
    DOWNCAST_WORDS,
    IDLE_BY_NAME,
    KNOWN_BY_SPELLING,
    LNC,
    OPTLEVEL,
    ORDER,
    TARGET,
    Idle,
    Known,
    Mode,
    resembles,
)
from neffcache.key.target import normal_target

_NUMBER = re.compile(r"-\.?[0-9]")
_SPACE = re.compile(r"\s")
_ASSIGNMENT = re.compile(r"--?[A-Za-z][\w-]*=")


@dataclass(frozen=True)
class Dropped:
    """An option that was given and is not in the canonical form, and why."""

    option: str
    kind: Literal["neutral", "wrapper", "default", "overridden", "placement"]
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"option": self.option, "kind": self.kind, "reason": self.reason}


class _Setting(NamedTuple):
    """A known option with its value(s); `slot` names what the right-most one wins for."""

    slot: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]
    is_default: bool


class _Kept(NamedTuple):
    """What stays as given and in order: a text option, or an unknown option with the words that follow it."""

    tokens: tuple[str, ...]


class _Idle(NamedTuple):
    tokens: tuple[str, ...]
    idle: Idle


_Item = _Setting | _Kept | _Idle


def _setting(known: Known, values: tuple[str, ...]) -> _Setting:
    values = tuple(known.synonyms.get(value, value) for value in values)
    if known.kind == "flag":
        tokens: tuple[str, ...] = (known.name,)
    elif len(values) == 1:
        tokens = (f"{known.name}={values[0]}",)
    else:
        tokens = (known.name, *values)
    return _Setting(known.slot, values, tokens, len(values) == 1 and values[0] in known.defaults)


class _Reader:
    """Reads tokens left to right into items.

    `odd`: something may be another spelling of a known option, or a word belongs to no option. Nothing can then be
    reordered or dropped safely.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.odd = False
        self.after_bare = False  # the item before is an unknown option that may be waiting for its value

    def items(self) -> Iterator[_Item]:
        while (token := self._take()) is not None:
            item = self._item(token)
            yield item
            self.after_bare = isinstance(item, _Kept) and item.tokens == (token,) and "=" not in token

    def _peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _take(self) -> str | None:
        token = self._peek()
        self.at += token is not None
        return token

    def _item(self, token: str) -> _Item:
        if token == "--":
            # Whatever follows is no option any more.
            rest = tuple(self.tokens[self.at :])
            self.at = len(self.tokens)
            return _Kept((token, *rest))
        if token in DEPRECATED_O1:
            return _setting(KNOWN_BY_SPELLING[OPTLEVEL], ("1",))
        name, value = _name_and_value(token)
        if name in KNOWN_BY_SPELLING:
            return self._known(KNOWN_BY_SPELLING[name], token, value)
        if name in IDLE_BY_NAME:
            return self._idle(IDLE_BY_NAME[name], token, value)
        if not _may_be_value(token):
            return self._unknown(name, token, value)
        self.odd = True
        return _Kept((token,))

    def _known(self, known: Known, token: str, value: str | None) -> _Item:
        if known.kind == "flag":
            if value is not None:
                self.odd = True
                return _Kept((token,))
            return _setting(known, (known.name.removeprefix("--").split("-", 1)[0],))
        following = self._peek()
        if value is None:
            wrong = _is_option(following) if known.kind == "text" else following is not None and not _is_word(following)
            if following is None or wrong:
                raise _needs_value(token)
            self.at += 1
            value = following
            if known.kind == "words":
                words = (value, *self._take_words()) if value in DOWNCAST_WORDS else (value,)
                # A further word may belong to the list as well.
                following = self._peek()
                self.odd |= following is not None and _may_be_value(following)
                if len(words) > 1:
                    return _setting(known, _words(words))
        if known.kind == "text":
            # As given: the compiler may add up repeated ones, so none of them is dropped.
            return _Kept((f"{known.name}={value}",))
        if value == "":
            raise _needs_value(token)
        if _SPACE.search(value):
            # No value of this option has a space in it: the token may as well be the value of what stands before it.
            self.odd = True
            return _Kept((token,))
        if known.slot == LNC and value not in ("1", "2"):
            raise Usage(f"The compiler option {token} gives an LNC of {value!r}.", hint="An LNC is 1 or 2.")
        if known.kind == "words":
            value = ",".join(_words(tuple(value.split(","))))
        return _setting(known, (value,))

    def _take_words(self) -> Iterator[str]:
        while (word := self._peek()) in DOWNCAST_WORDS:
            self.at += 1
            yield str(word)

    def _idle(self, idle: Idle, token: str, value: str | None) -> _Item:
        if self.after_bare and _SPACE.search(token):
            # Perhaps the quoted value of the unknown option before it, which must not be dropped.
            self.odd = True
        tokens: tuple[str, ...] = (token,)
        following = self._peek()
        if idle.valued and value is None and following is not None and _may_be_value(following):
            tokens = (token, str(self._take()))
        return _Idle(tokens, idle)

    def _unknown(self, name: str, token: str, value: str | None) -> _Item:
        if slots := resembles(name):
            if slots <= {LNC, TARGET}:
                # These two have components of their own in the job key: they must be readable.
                raise Usage(
                    f"The compiler option {token} looks like {' or '.join(sorted(slots))} but is not written so.",
                    hint=f"Write it out: {LNC} 2, {TARGET} trn2.",
                )
            self.odd = True
        tokens = [token]
        # Like every option parser: words behind an option may be its values, the next option is not.
        while value is None and (following := self._peek()) is not None and _may_be_value(following):
            self.odd |= following in DEPRECATED_O1
            tokens.append(following)
            self.at += 1
        return _Kept(tuple(tokens))


def _name_and_value(token: str) -> tuple[str, str | None]:
    if token.startswith("-O") and not token.startswith("--"):
        rest = token[2:]
        return "-O", rest.removeprefix("=") if rest else None
    if token.startswith("-") and "=" in token:
        name, value = token.split("=", 1)
        return name, value
    return token, None


def _is_word(token: str) -> bool:
    return not token.startswith("-") and not _SPACE.search(token) and token != ""


def _is_option(token: str | None) -> bool:
    if token is None:
        return False
    name, _ = _name_and_value(token)
    return name in KNOWN_BY_SPELLING or name in IDLE_BY_NAME or token in DEPRECATED_O1


def _may_be_value(token: str) -> bool:
    """Whether an option may take this token: a word, or a quoted string that does not read like `--a=b c`."""
    if not token.startswith("-") or token == "-" or _NUMBER.match(token):
        return True
    return bool(_SPACE.search(token)) and not _ASSIGNMENT.match(token)


def _words(words: tuple[str, ...]) -> tuple[str, ...]:
    """A list of operators is a set; anything that holds another word stays as given."""
    return tuple(sorted(set(words))) if set(words) <= DOWNCAST_WORDS else words


def _needs_value(token: str) -> Usage:
    return Usage(f"The compiler option {token} lacks its value.", hint=f"Write {token.rstrip('=')}=VALUE.")


class _Form(NamedTuple):
    """What a list of options means: known settings in the table's order, and what is kept as given."""

    settings: tuple[_Setting, ...]
    kept: tuple[_Kept, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        settings = tuple(token for setting in self.settings for token in setting.tokens)
        return (*settings, *(token for kept in self.kept for token in kept.tokens))


def _reduce(items: Sequence[_Item]) -> tuple[_Form, dict[str, _Setting], tuple[Dropped, ...]]:
    given: dict[str, _Setting] = {}
    dropped: list[Dropped] = []
    for item in items:
        if isinstance(item, _Idle):
            dropped.append(Dropped(shlex.join(item.tokens), item.idle.kind, item.idle.reason))
        elif isinstance(item, _Setting):
            if item.slot in given:
                dropped.append(Dropped(shlex.join(given[item.slot].tokens), "overridden", "a later one wins"))
            given[item.slot] = item
    counting = dict(given)
    for slot, setting in given.items():
        if setting.is_default:
            del counting[slot]
            dropped.append(Dropped(shlex.join(setting.tokens), "default", "is what the compiler does without it"))
    # The type only matters where something is cast. It goes when this very command line says that nothing is; when
    # nothing is cast merely by default it stays, because that default was another one in older compilers: whoever wrote
    # the type may rely on it, and a needless miss is better than a false hit.
    if AUTO_CAST_TYPE in counting and AUTO_CAST in given and given[AUTO_CAST].values == ("none",):
        dropped.append(
            Dropped(shlex.join(counting.pop(AUTO_CAST_TYPE).tokens), "default", "only matters with automatic casts")
        )
    settings = tuple(sorted(counting.values(), key=lambda setting: ORDER[setting.slot]))
    return _Form(settings, tuple(item for item in items if isinstance(item, _Kept))), given, tuple(dropped)


@dataclass(frozen=True)
class Options:
    """Parsed compiler options.

    `tokens` are the canonical form: known options in the table's order, then all others as given and in order.
    `verbatim`: nothing could be reordered or dropped safely, and the tokens are exactly those given.
    `lnc`, `target` and `optlevel` are those found inside; None: not given.
    """

    mode: Mode
    tokens: tuple[str, ...]
    verbatim: bool
    lnc: int | None
    target: str | None
    optlevel: str | None
    dropped: tuple[Dropped, ...]

    @classmethod
    def parse(cls, texts: Sequence[str], mode: Mode = "compile") -> Options:
        """Read options from texts, left to right, each split as a shell would; one string is one text.

        `mode` is what the options are for: eager operators and compiled graphs have different default levels.
        Raises Usage for an open quote, a known option without its value, and an LNC that is not 1 or 2.
        """
        tokens: list[str] = []
        for text in (texts,) if isinstance(texts, str) else texts:
            try:
                tokens.extend(shlex.split(text))
            except ValueError as error:
                told = f"The compiler options {text!r} cannot be split: {error}."
                raise Usage(told, hint="Close the quote.") from None
        return cls._of(tuple(tokens), mode)

    @classmethod
    def _of(cls, tokens: tuple[str, ...], mode: Mode) -> Options:
        reader = _Reader(tokens)
        form, given, dropped = _reduce(tuple(reader.items()))
        verbatim = reader.odd or not _reads_back(form)
        return cls(
            mode=mode,
            tokens=tokens if verbatim else form.tokens,
            verbatim=verbatim,
            lnc=int(given[LNC].values[0]) if LNC in given else None,
            target=given[TARGET].values[0] if TARGET in given else None,
            optlevel=given[OPTLEVEL].values[0] if OPTLEVEL in given else None,
            dropped=() if verbatim else dropped,
        )

    @property
    def canonical(self) -> str:
        """One string, quoted for a shell; what `NEURON_CC_FLAGS` is set to. Parses back to itself."""
        return shlex.join(self.tokens)

    def component(self) -> dict[str, Any]:
        """The JSON of the job key's component `options`. A level stays in it: it reaches eager operators too."""
        return {"options": list(self.tokens)}

    def graph_component(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """The JSON of the `options` of a compile key: what one graph of this mode gets.

        A level that is the default of the mode and one that is not given are the same here. `environ` is asked for
        `NEURON_COMPILER_OPT_LEVEL`, which overrides the default but not an explicit level.
        """
        if self.verbatim:
            return {"mode": self.mode, "options": list(self.tokens)}
        default = environ.get("NEURON_COMPILER_OPT_LEVEL", DEFAULT_OPTLEVEL[self.mode]).removeprefix("-O")
        rest, _ = self._without({f"{OPTLEVEL}={self.optlevel}"} if self.optlevel is not None else set())
        return {"optlevel": default if self.optlevel is None else self.optlevel, "options": rest}

    def _without(self, settings: set[str]) -> tuple[list[str], list[str]]:
        """The tokens without these known settings, and those taken out.

        Known settings stand first, so it is the first equal token that goes; behind `--` there may be another.
        """
        rest, taken = list(self.tokens), []
        for token in self.tokens:
            if token in settings and token not in taken:
                rest.remove(token)
                taken.append(token)
        return rest, taken

    def for_placement(self, target: str, lnc: int) -> Options:
        """These options without an LNC and a target that the job key names already, so that either way is one key.

        Raises Usage when they contradict. A target that says less than the job's (trn3 and trn3-rev2) is kept: the
        compiler takes the right-most.
        """
        if self.lnc is not None and self.lnc != lnc:
            raise Usage(f"The compiler options give LNC {self.lnc}, the job has {lnc}.", hint="Remove one of them.")
        base = target.split("-")[0]
        if self.target is not None and normal_target(self.target, origin="the compiler options").split("-")[0] != base:
            raise Usage(f"The compiler options give target {self.target}, the job has {target}.", hint="Remove one.")
        if self.verbatim:
            return self
        said = {f"{LNC}={self.lnc}"} if self.lnc is not None else set()
        if self.target == target:
            said.add(f"{TARGET}={target}")
        rest, taken = self._without(said)
        placed = (Dropped(token, "placement", "the job says so") for token in taken)
        return replace(self._of(tuple(rest), self.mode), dropped=(*self.dropped, *placed))


def _reads_back(form: _Form) -> bool:
    """Whether the canonical tokens mean what they were made from.

    They do not when a word has moved next to an option that would take it as its value. Checking it here is what makes
    two meanings with one form impossible.
    """
    reader = _Reader(form.tokens)
    again, _, _ = _reduce(tuple(reader.items()))
    return again == form and not reader.odd
