"""10,000 generated option lists: no crash, a form that parses to itself, no two meanings with one form.

Hypothesis draws seeds; each seed makes a hundred cases, which keeps the run to seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neffcache.errors import Usage
from neffcache.key.options import Options

CASES_PER_SEED = 100
SEEDS = st.integers(0, 2**32)

# A second, independent model: an abstract option list, what it means, and all ways to write it. It shares no code or
# table with the parser.
CHOICES: dict[str, tuple[list[str], dict[str, str | None]]] = {
    # slot: (spellings, value -> meaning; None: as if it were not given)
    "lnc": (["-lnc", "--lnc", "--logical-nc-config"], {"1": "1", "2": "2"}),
    "level": (["-O", "--optlevel"], {"1": "1", "2": "2", "3": "3"}),
    "cast": (["--auto-cast"], {"none": None, "matmult": "matmult", "all": "all"}),
    "int64": (["--native-int64"], {"default": None, "disabled": None, "enabled": "enabled"}),
    "downcast": (["--implicit-integer-downcast"], {"default": None, "all": None, "none": "none", "dot": "dot"}),
    "strategy": (["--distribution-strategy"], {"generic": None, "llm-training": "llm", "NEMO": "llm"}),
    "model": (["--model-type"], {"generic": "generic", "transformer": "transformer"}),
    "target": (["--target"], {"trn1": "trn1", "trn2": "trn2"}),
}
FLAGS: dict[str, tuple[str, str | None]] = {
    "--enable-mixed-precision-accumulation": ("mixed", None),
    "--disable-mixed-precision-accumulation": ("mixed", "off"),
    "--enable-saturate-infinity": ("saturate", "on"),
    "--enable-fast-context-switch": ("switch", "on"),
}
UNKNOWN = [["--internal-a"], ["--internal-b=--x --y"], ["--internal-c", "two words"], ["--zeta=1"], ["--zeta=2"]]
IDLE = [["--verbose", "info"], ["--logfile", "a b"], ["--cache_dir=/x"], ["--no_cache"], ["--output", "o.neff"]]

Meaning = tuple[tuple[tuple[str, str], ...], tuple[tuple[str, ...], ...]]


def quoted(rng: random.Random, token: str) -> str:
    return shlex.quote(token) if rng.random() < 0.5 else f'"{token}"'


def written(rng: random.Random, spelling: str, value: str) -> list[str]:
    ways: list[list[str]] = [[spelling, value], [f"{spelling}={value}"]]
    if spelling == "-O":
        ways = [[spelling, value], [spelling + value]]
    return rng.choice(ways)


def program(rng: random.Random) -> tuple[list[str], Meaning]:
    """A random option list as texts, and what it means."""
    tokens: list[list[str]] = []
    slots: dict[str, str | None] = {}
    unknown: list[tuple[str, ...]] = []
    for _ in range(rng.randrange(6)):
        kind = rng.randrange(6)
        if kind < 3:
            slot = rng.choice(list(CHOICES))
            spellings, values = CHOICES[slot]
            value = rng.choice(list(values))
            slots[slot] = values[value]
            tokens.append(written(rng, rng.choice(spellings), value))
        elif kind == 3:
            flag = rng.choice(list(FLAGS))
            slot, meaning = FLAGS[flag]
            slots[slot] = meaning
            tokens.append([flag])
        elif kind == 4:
            option = rng.choice(UNKNOWN)
            unknown.append(tuple(option))
            tokens.append(option)
        else:
            tokens.append(rng.choice(IDLE))
    words = [quoted(rng, token) for option in tokens for token in option]
    cut = rng.randrange(len(words) + 1)
    texts = [(" " * rng.randrange(1, 3)).join(part) for part in (words[:cut], words[cut:])]
    return texts, (tuple(sorted((s, v) for s, v in slots.items() if v is not None)), tuple(unknown))


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_forms_and_meanings_are_one_to_one(seed: int) -> None:
    rng = random.Random(seed)
    meaning_of: dict[str, Meaning] = {}
    form_of: dict[Meaning, str] = {}
    for _ in range(CASES_PER_SEED):
        texts, meaning = program(rng)
        options = Options.parse(texts)
        assert not options.verbatim
        assert Options.parse([options.canonical]).canonical == options.canonical
        assert meaning_of.setdefault(options.canonical, meaning) == meaning
        assert form_of.setdefault(meaning, options.canonical) == options.canonical


SOUP = [
    "--optlevel", "-O", "-O2", "--optlevel=1", "1", "2", "--lnc", "-lnc", "--lnc=1", "--auto-cast",
    "--auto-cast=all", "none", "--auto-cast-type", "fp16", "--implicit-integer-downcast", "dot", "pow",
    "dot,pow", "all", "--verbose", "--logfile", "info", "--tensorizer-options",
    "--tensorizer-options=--a --b", "--no_cache", "--cache_dir", "--internal-a", "--internal-b=1",
    "--enable-saturate-infinity", "--disable-saturate-infinity", "--enable-saturate-infinity=1", "--optl=1",
    "-1", "-", "--", "", "--optlevel=1 --x", "--internal-a --b", "enable-experimental-O1", "--x y", "'", "\\",
    "ü", "--ü=1", "-=", "--=", "=", "-x",
]  # fmt: skip


class Refused(Exception):
    """The stand-in parser takes this list for wrong."""


class Argparse(argparse.ArgumentParser):
    """Python's own option parser with the documented options: a plausible compiler, and no code of ours."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        for spellings, _ in CHOICES.values():
            words = {"nargs": "+"} if "downcast" in spellings[0] else {}
            self.add_argument(*spellings, **words)  # type: ignore[arg-type]
        self.add_argument("--auto-cast-type", default="bf16")
        for name in ("--tensorizer-options", "--verbose", "--logfile", "--cache_dir"):
            self.add_argument(name)
        self.add_argument("--no_cache", action="store_true")
        self.add_argument("--enable-saturate-infinity", dest="saturate", action="store_const", const="enable")
        self.add_argument("--disable-saturate-infinity", dest="saturate", action="store_const", const="disable")

    def error(self, message: str) -> NoReturn:
        raise Refused(message)

    def meaning(self, tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        tokens = ["--optlevel=1" if "enable-experimental-O1" in token else token for token in tokens]
        found, rest = self.parse_known_args(tokens)
        named = vars(found)
        for idle in ("verbose", "logfile", "cache_dir", "no_cache"):
            del named[idle]
        if named["auto_cast"] == "none":
            named["auto_cast"] = None
            named["auto_cast_type"] = "bf16"
        words = named["implicit_integer_downcast"] or ["all"]
        named["implicit_integer_downcast"] = sorted({*",".join(words).split(",")})
        return named, rest


COMPILER = Argparse()


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_a_form_of_any_token_soup_is_a_fixed_point_and_means_to_another_parser_what_the_soup_meant(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES_PER_SEED):
        tokens = [rng.choice(SOUP) for _ in range(rng.randrange(7))]
        texts = [shlex.join(tokens)]
        try:
            once = Options.parse(texts)
        except Usage:
            continue
        again = Options.parse([once.canonical])
        assert (again.tokens, again.verbatim, again.lnc, again.target, again.optlevel) == (
            once.tokens, once.verbatim, once.lnc, once.target, once.optlevel,
        )  # fmt: skip
        assert shlex.split(once.canonical) == list(once.tokens)
        with contextlib.suppress(Refused):
            assert COMPILER.meaning(once.tokens) == COMPILER.meaning(tokens)
        placed = once.for_placement("trn2", once.lnc or 2)
        assert Options.parse([placed.canonical]).tokens == placed.tokens
        once.graph_component({})


@pytest.mark.fast
@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=4))
def test_no_text_at_all_crashes(texts: list[str]) -> None:
    try:
        once = Options.parse(texts)
    except Usage:
        return
    assert Options.parse([once.canonical]).canonical == once.canonical
