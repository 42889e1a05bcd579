"""Inductor's own directory: which of its files are results. Needs no torch; the real thing is tests/integration."""

from __future__ import annotations

import _ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from neffcache.compile.host.native import SETTINGS, InductorRules, InductorStore, elf_is_whole
from neffcache.compile.stores import native_store
from neffcache.errors import Usage

pytestmark = pytest.mark.fast

KEY = "cbdqjaps3oi5qppxscjptygcrqkkhehibae6edcgjo5o5gj6wmev"
GRAPH = "fghumnxnfzd3qpr5bdlxnx6trhcaswrymht2pn3kis37iyzpqv3j"
AROUND = "atghv4ryuybmcjzoeyegic4tkkxorjef5yaippbkmngtz33xylg3"
DIGEST = "m23hh44tvwjccux3l7l536sa7j73op3wd22njeky77otc5wesga"


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        (f"fxgraph/gh/{GRAPH}/{DIGEST}", "artifact"),
        (f"aotautograd/{AROUND}/{DIGEST}", "artifact"),
        (f"bd/{KEY}.py", "artifact"),
        (f"bd/{KEY}.main.cpp", "artifact"),
        (f"bd/{KEY}.main.so", "artifact"),
        (f"yx/{KEY}.so", "artifact"),
        (f"yx/{KEY}.so.load_ok", "marker"),
        (f"zz/{KEY}.so.load_ok", "incomplete"),
        (f"locks/{KEY}.lock", "transient"),
        (f"fxgraph/gh/{GRAPH}/.4711.139.tmp", "transient"),
        ("bd/.4711.139.tmp", "transient"),
        (f"bd/{KEY}.main.o", "transient"),
        (f"bd/{KEY}.main.so.tmp", "transient"),
        ("notes.txt", "foreign"),
        (f"fxgraph/gh/{GRAPH}", "foreign"),
    ],
)
def test_what_a_file_is(path: str, verdict: str) -> None:
    assert InductorRules().verdict(path, {f"yx/{KEY}.so"}) == verdict


def test_graphs_are_tied_to_their_keys_and_libraries_to_their_locks() -> None:
    rules = InductorRules()
    assert rules.graph(f"fxgraph/gh/{GRAPH}/{DIGEST}") == GRAPH
    assert rules.graph(f"aotautograd/{AROUND}/{DIGEST}") == AROUND
    assert rules.graph(f"bd/{KEY}.main.so") is None
    assert rules.locks(f"bd/{KEY}.main.so") == (f"locks/{KEY}.lock",)
    assert rules.locks(f"fxgraph/gh/{GRAPH}/{DIGEST}") == ()


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 1000, -1])
def test_a_library_whose_writer_was_killed_is_not_whole(tmp_path: Path, cut: int) -> None:
    whole = Path(_ctypes.__file__).read_bytes()
    assert elf_is_whole(Path(_ctypes.__file__))
    library = tmp_path / f"{KEY}.main.so"
    library.write_bytes(whole[:cut])
    assert not elf_is_whole(library)
    assert not InductorRules().whole(f"bd/{KEY}.main.so", library)


def test_the_store_is_chosen_by_what_an_identity_says() -> None:
    assert native_store({"name": "host"}) is None
    assert isinstance(native_store({"name": "host", "native_store": "inductor"}), InductorStore)


def test_its_directory_and_switches_are_set_before_python_starts(tmp_path: Path) -> None:
    environment = InductorStore().environment(tmp_path / "view", tmp_path / "private")
    assert environment == {**SETTINGS, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "view/inductor")}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1"),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "0"),
        ("TORCHINDUCTOR_AUTOGRAD_CACHE", "0"),
        ("TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE", "1"),
        ("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "1"),
    ],
)
def test_a_setting_that_keeps_results_elsewhere_is_refused_with_both_values(name: str, said: str) -> None:
    InductorStore().check_environment({name: SETTINGS[name]})
    with pytest.raises(Usage) as refused:
        InductorStore().check_environment({name: said})
    assert (refused.value.details["said"], refused.value.details["needed"]) == (said, SETTINGS[name])


def test_counters_import_no_compiler() -> None:
    code = (
        "import sys; from neffcache.compile.host.native import InductorStore; "
        "from neffcache.compile.toolchain import Counters; "
        "assert InductorStore().counters() == Counters(0, 0, 0, frozenset()); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
