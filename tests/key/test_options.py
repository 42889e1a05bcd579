"""Compiler options: one meaning, one form."""

from __future__ import annotations

import pytest

from neffcache.errors import Usage
from neffcache.key.option_table import IDLE, KNOWN, Idle
from neffcache.key.options import Options

pytestmark = pytest.mark.fast


def form(*texts: str) -> str:
    return Options.parse(texts).canonical


SAME = [
    ["-O1", "-O 1", "--optlevel 1", "--optlevel=1", "-O=1", "--enable-experimental-O1", "enable-experimental-O1"],
    ["-lnc 2", "-lnc=2", "--lnc=2", "--lnc 2", "--logical-nc-config=2", "--logical-nc-config 2"],
    ["", "--native-int64 disabled", "--native-int64=default", "--auto-cast none", "--auto-cast-type bf16",
     "--implicit-integer-downcast all", "--implicit-integer-downcast=default", "--distribution-strategy generic",
     "--enable-mixed-precision-accumulation", "--framework XLA", "   ",
     "--native-int64 enabled --native-int64 disabled",
     "--disable-mixed-precision-accumulation --enable-mixed-precision-accumulation"],
    ["--distribution-strategy=NEMO", "--distribution-strategy llm-training"],
    ["--optlevel 1 --lnc 2", "--lnc=2  -O1", "'--lnc' \"2\"\t-O3 -O 1", "-lnc 1 -O1 -lnc 2"],
    ["--implicit-integer-downcast=dot,pow", "--implicit-integer-downcast pow,dot",
     "--implicit-integer-downcast=pow,dot,pow"],
    ["--implicit-integer-downcast dot pow", "--implicit-integer-downcast pow dot pow"],
    ["--implicit-integer-downcast dot", "--implicit-integer-downcast=dot"],
    ["--tensorizer-options='--a --b=c'", "--tensorizer-options '--a --b=c'", "\"--tensorizer-options=--a --b=c\""],
    ["--auto-cast=all", "--auto-cast all --auto-cast-type bf16",
     "--auto-cast-type fp16 --auto-cast all --auto-cast-type bf16"],
    # A known option between two unknown ones, whose second value has spaces and dashes.
    ["--internal-c 'a b' --lnc=2 --internal-b='--x --y'", "--lnc=2 --internal-c 'a b' --internal-b='--x --y'"],
    ["--internal-x 'a b' --y", "--internal-x a\\ b --verbose debug --y --cache_dir=/a --no_cache"],
]  # fmt: skip

DIFFERENT = [
    ("", "-O1"),
    ("-O1", "-O2"),
    ("--lnc 1", "--lnc 2"),
    ("--target trn1", "--target trn2"),
    ("", "--model-type transformer"),
    ("", "--model-type generic"),
    ("--auto-cast all", "--auto-cast matmult"),
    ("--auto-cast all", "--auto-cast all --auto-cast-type fp16"),
    ("", "--auto-cast-type fp16"),
    ("", "--native-int64 enabled"),
    ("", "--implicit-integer-downcast none"),
    ("--implicit-integer-downcast dot", "--implicit-integer-downcast pow"),
    ("", "--disable-mixed-precision-accumulation"),
    ("", "--enable-saturate-infinity"),
    ("--enable-saturate-infinity", "--enable-saturate-infinity --disable-saturate-infinity"),
    (
        "--enable-saturate-infinity --disable-saturate-infinity",
        "--disable-saturate-infinity --enable-saturate-infinity",
    ),
    ("--internal-a --internal-b", "--internal-b --internal-a"),
    ("--internal-a=1 --internal-a=2", "--internal-a=2"),
    ("--internal-a 'b c'", "--internal-a b c"),
    ("--tensorizer-options='--a --b'", "--tensorizer-options='--b --a'"),
    ("--tensorizer-options='--a  --b'", "--tensorizer-options='--a --b'"),
    ("--tensorizer-options=a --tensorizer-options=b", "--tensorizer-options=b"),
    # Perhaps other spellings of known options: which of the two wins is not known, so both orders stay.
    ("--optl=1 --optlevel=2", "--optlevel=2 --optl=1"),
    ("--OPTLEVEL=1 --optlevel=2", "--optlevel=2 --OPTLEVEL=1"),
    (
        "--enable-saturate-infinity=false --enable-saturate-infinity",
        "--enable-saturate-infinity --enable-saturate-infinity=false",
    ),
    # A quoted value that reads like a neutral or a known option is not dropped and not read.
    ("--internal-a '--verbose=info --x'", "--internal-a"),
    ("--internal-a '--optlevel=1 --x' --optlevel=2", "--internal-a --optlevel=2"),
    # A word must not move behind an option that would take it.
    ("--internal-a --lnc=2 word", "--internal-a word --lnc=2"),
    ("--internal-a --verbose info word", "--internal-a word"),
    ("--implicit-integer-downcast dot --lnc=2 pow", "--implicit-integer-downcast dot pow --lnc=2"),
    ("--internal-a --lnc=2 '--b c'", "--internal-a '--b c' --lnc=2"),
    ("--internal-a --lnc=2 -1", "--internal-a -1 --lnc=2"),
    ("-- --lnc=2", "--lnc=2"),
]  # fmt: skip


@pytest.mark.parametrize("texts", SAME, ids=lambda texts: texts[-1][:40])
def test_one_meaning_has_one_form(texts: list[str]) -> None:
    assert len({form(text) for text in texts}) == 1


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_two_meanings_have_two_forms(left: str, right: str) -> None:
    assert form(left) != form(right)


@pytest.mark.parametrize("text", sorted({text for texts in (*SAME, *DIFFERENT) for text in texts}))
def test_a_form_parses_back_to_itself_with_the_same_reading(text: str) -> None:
    once = Options.parse([text])
    twice = Options.parse([once.canonical])
    assert (twice.canonical, twice.tokens, twice.verbatim) == (once.canonical, once.tokens, once.verbatim)
    assert (twice.lnc, twice.target, twice.optlevel) == (once.lnc, once.target, once.optlevel)


def test_texts_are_joined_left_to_right() -> None:
    assert form("-O1", "--optlevel", "2") == form("-O2") == form("-O1 -O2")
    assert form("--internal-a|--internal-b") != form("--internal-a", "--internal-b")
    assert Options.parse("-O1 --lnc 2") == Options.parse(["-O1 --lnc 2"])


def test_what_is_found_inside_can_be_asked_for() -> None:
    options = Options.parse(["--lnc 1 -O2 --target trn1", "--logical-nc-config 2 --target=trn2 -O3"])
    assert (options.lnc, options.target, options.optlevel) == (2, "trn2", "3")
    empty = Options.parse([])
    assert (empty.lnc, empty.target, empty.optlevel, empty.canonical) == (None, None, None, "")


@pytest.mark.parametrize("idle", IDLE, ids=lambda idle: idle.name)
def test_each_neutral_and_wrapper_option_is_left_out_and_reported(idle: Idle) -> None:
    for text in [f"{idle.name} /a", f"{idle.name}=/a"] if idle.valued else [idle.name]:
        options = Options.parse([f"-O1 {text} --internal-a"])
        assert options.canonical == "--optlevel=1 --internal-a"
        assert [(d.option, d.kind, d.reason) for d in options.dropped] == [(text, idle.kind, idle.reason)]


def test_defaults_and_overridden_options_are_reported_too() -> None:
    dropped = Options.parse(["-O1 -O3 --native-int64 disabled --auto-cast none --auto-cast-type fp16"]).dropped
    assert [(d.option, d.kind) for d in dropped] == [
        ("--optlevel=1", "overridden"),
        ("--native-int64=disabled", "default"),
        ("--auto-cast=none", "default"),
        ("--auto-cast-type=fp16", "default"),
    ]


def test_unknown_options_stay_as_given_and_in_order_behind_the_known() -> None:
    given = "--zeta=1 --alpha 'two words' --internal-hlo2tensorizer-options='--verify-hlo=true --x' --zeta=1"
    options = Options.parse([f"{given} --lnc 2"])
    assert list(options.tokens) == [
        "--lnc=2", "--zeta=1", "--alpha", "two words",
        "--internal-hlo2tensorizer-options=--verify-hlo=true --x", "--zeta=1",
    ]  # fmt: skip
    assert not options.verbatim


@pytest.mark.parametrize(
    "text",
    ["'open", "--optlevel", "-O", "--lnc", "--optlevel=", "--auto-cast --lnc=2", "--lnc 3", "--lnc=two",
     "--tensorizer-options --lnc=2", "--lnc2", "--logical=2", "--targ trn2"],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_as_usage(text: str) -> None:
    with pytest.raises(Usage) as refused:
        form(text)
    assert refused.value.hint


def test_every_setting_that_is_no_default_is_in_the_component() -> None:
    forms = [Options.parse([]).component()]
    for known in KNOWN:
        texts = [known.name] if known.kind == "flag" else [f"{known.name}=1", f"{known.name}=2"]
        forms += [Options.parse([text]).component() for text in texts if not (known.kind == "flag" and known.defaults)]
    assert len({repr(one) for one in forms}) == len(forms)


def test_a_level_counts_for_a_job_and_its_default_does_not_for_a_graph() -> None:
    # One text reaches eager operators (default 1) and compiled graphs (default 2), so -O2 is not nothing for a job.
    none, two = Options.parse([]), Options.parse(["-O2"])
    assert none.component() != two.component()
    assert none.graph_component({}) == two.graph_component({}) == {"optlevel": "2", "options": []}
    eager = Options.parse(["-O1"], mode="eager")
    assert Options.parse([], mode="eager").graph_component({}) == eager.graph_component({})
    assert none.graph_component({}) != Options.parse(["-O1"]).graph_component({})


def test_an_overridden_default_level_is_not_an_explicit_one() -> None:
    environ = {"NEURON_COMPILER_OPT_LEVEL": "-O1"}
    assert Options.parse([]).graph_component(environ) != Options.parse(["-O2"]).graph_component(environ)
    assert Options.parse([]).graph_component(environ) == Options.parse(["-O1"]).graph_component(environ)


def test_an_lnc_and_a_target_that_the_job_names_make_no_other_key() -> None:
    inside = Options.parse(["--lnc 2 --target trn2 -O1 --internal-a"]).for_placement("trn2", 2)
    assert inside.component() == Options.parse(["-O1 --internal-a"]).for_placement("trn2", 2).component()
    assert [d.option for d in inside.dropped] == ["--target=trn2", "--lnc=2"]
    with pytest.raises(Usage, match="LNC 2"):
        Options.parse(["--lnc 2"]).for_placement("trn2", 1)
    with pytest.raises(Usage, match="target trn1"):
        Options.parse(["--target trn1"]).for_placement("trn2", 2)


def test_a_target_that_says_less_than_the_job_stays_because_the_compiler_takes_it() -> None:
    assert Options.parse(["--target trn3"]).for_placement("trn3-rev2", 2).canonical == "--target=trn3"


def test_only_known_settings_are_taken_out_not_what_reads_like_them() -> None:
    behind = Options.parse(["--lnc=2 -O1 -- --lnc=2 --optlevel=1"])
    assert behind.for_placement("trn2", 2).tokens == ("--optlevel=1", "--", "--lnc=2", "--optlevel=1")
    assert behind.graph_component({})["options"] == ["--lnc=2", "--", "--lnc=2", "--optlevel=1"]
    assert Options.parse(["-- --lnc=2"]).for_placement("trn2", 2).tokens == ("--", "--lnc=2")
