"""Keys of other caches, against values computed by hand (printf, sha256sum, md5sum, the xxHash reference)."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from neffcache.key import native

pytestmark = pytest.mark.fast


def test_the_in_memory_key_keeps_order_and_spacing_of_the_flags() -> None:
    arguments = native.torchneuron_arguments("--lnc=2 -O3")
    key = native.torchneuron_memory_key("base", "trn2", 2, native.torchneuron_level("compile"), arguments)
    assert key == "base_trn2_2_O2_--model-type_transformer_--auto-cast-none_--lnc-2_-O3"
    spaced = native.torchneuron_arguments("--lnc=2  -O3")
    assert native.torchneuron_memory_key("base", "trn2", 2, "-O2", spaced).endswith("--lnc-2__-O3")


def test_flags_that_are_not_set_and_flags_that_are_empty_are_two_keys() -> None:
    unset = native.torchneuron_memory_key("b", "trn1", 1, "-O1", native.torchneuron_arguments(None))
    empty = native.torchneuron_memory_key("b", "trn1", 1, "-O1", native.torchneuron_arguments(""))
    assert unset == "b_trn1_1_O1_--model-type_transformer_--auto-cast-none"
    assert empty == unset + "_"


def test_the_level_follows_the_mode_unless_the_environment_overrides_it() -> None:
    assert [native.torchneuron_level(mode) for mode in ("eager", "compile")] == ["-O1", "-O2"]
    assert native.torchneuron_level("eager", "-O3") == "-O3"


def test_the_disk_key_is_the_hash_of_key_and_ir() -> None:
    memory = "base_trn2_2_O2_--model-type_transformer_--auto-cast-none_--lnc-2_-O3"
    assert native.torchneuron_disk_key(memory, b"IR") == "ac946c92c319e19f4a39c21679ff6019"
    assert native.torchneuron_disk_key(memory + "I", b"R") == native.torchneuron_disk_key(memory, b"IR")


def test_the_disk_key_of_nothing_is_zeros() -> None:
    assert native.torchneuron_disk_key("", b"") == "0" * 32


def test_a_neff_lies_two_directories_deep() -> None:
    key = "ac946c92c319e19f4a39c21679ff6019"
    assert native.torchneuron_path(key) == PurePosixPath(f"ac/94/{key}.neff")


@pytest.mark.parametrize("bad", ["", "../" + "a" * 29, "A" * 32, "a" * 33, "a" * 32 + "\n"])
def test_what_is_no_disk_key_is_no_path(bad: str) -> None:
    with pytest.raises(ValueError, match="on-disk key"):
        native.torchneuron_path(bad)


def test_the_older_python_key_sorts_its_flags() -> None:
    def key(*flags: str) -> str:
        return native.torchneuron_python_key(
            b"HLO", target="trn1", model_type="transformer", level="-O2", auto_cast="none", framework="XLA", lnc="1",
            compiler_version="2.21", flags=flags,
        )  # fmt: skip

    assert key("--b", "--a") == "db4f0a7e8a06e51cb7a423dcbf2da9ccd81583d8d25797931871c142d6e228fb"
    assert key("--a", "--b") == key("--b", "--a")


@pytest.mark.parametrize(
    ("flags", "as_json", "expected"),
    [
        ([], False, "d41d8cd9"),
        (["--target=trn1"], True, "e30acd3a"),
        (["--model-type=transformer", "--auto-cast=none"], False, "2c2d707e"),
    ],
)
def test_flag_hashes_are_those_of_entries_seen_in_the_field(flags: list[str], as_json: bool, expected: str) -> None:
    assert native.libneuronxla_flags_hash(native.libneuronxla_flags_text(flags, as_json=as_json)) == expected


def test_an_entry_lies_below_its_compiler_version() -> None:
    found = native.libneuronxla_directory("2.21.18209.0+043b1bf7", "15329989265349737271", "")
    assert found == PurePosixPath("neuronxcc-2.21.18209.0+043b1bf7/MODULE_15329989265349737271+d41d8cd9")
    for version, graph in (("", "1"), ("2", "../x"), ("../2", "1"), ("2", "")):
        with pytest.raises(ValueError, match="cache entry"):
            native.libneuronxla_directory(version, graph, "")
