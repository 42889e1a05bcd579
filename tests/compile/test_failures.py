"""What an exit status and a log say about a failed compile, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from neffcache.compile.failures import LOG_KEPT, first_error, of_exit, policy, shortened
from neffcache.compile.neuron import neff
from neffcache.compile.neuron.error_codes import ADVICE, PAGE, advice
from neffcache.errors import StoreFault

pytestmark = pytest.mark.fast

REFUSAL = "INFO: begin\nERROR: [NCC_EVRF001] unsupported operator\nERROR: [NCC_IXXX999] giving up\n"


@pytest.mark.parametrize(
    ("status", "log", "kind"),
    [
        (1, REFUSAL, "refused"),
        (70, REFUSAL, "refused"),
        (70, "ERROR: Backend exited with code 70", "flaky"),
        (70, "", "flaky"),
        (1, "ERROR: something", "failed"),
        (-9, "", "killed"),
        (-11, "", "killed"),
        (1, "terminate called after throwing an instance of 'std::bad_alloc'", "killed"),
        (70, "[NCC_ITIN902] TensorInitialization error: Cannot allocate memory", "killed"),
        (1, "g++: fatal error: Killed signal terminated program cc1plus", "killed"),
        (1, "OSError: [Errno 28] No space left on device", "io"),
        (1, "[NCC_IXXX001] internal error\nOSError: [Errno 5] Input/output error", "io"),
        (127, "neuronx-cc: error while loading shared libraries: libx.so", "io"),
        # A library that is missing by the way does not make the graph's own refusal a fault of the machine, nor
        # something to be remembered.
        (1, f"warning: libfoo.so: cannot open shared object file\n{REFUSAL}", "failed"),
        (1, "ERROR: [NCC_EVRF059] kernel file does not exist", "failed"),
    ],
)
def test_classes(status: int, log: str, kind: str) -> None:
    fault = of_exit("k" * 32, "block", status, log)
    assert fault.details["class"] == kind
    assert "block" in fault.message
    assert policy(fault).remembered == (kind == "refused"), "nothing but a refusal is ever remembered"
    assert policy(fault).stops == (kind == "io")


def test_memory_that_the_kernel_took_explains_an_exit_that_does_not() -> None:
    assert of_exit("k", "block", 70, "", starved=True).details["class"] == "killed"
    assert of_exit("k", "block", 70, REFUSAL, starved=True).details["class"] == "killed"


def test_a_full_disk_is_the_store_s_error() -> None:
    assert isinstance(of_exit("k", "block", 1, "write: No space left on device"), StoreFault)
    assert not isinstance(of_exit("k", "block", 1, "read: Input/output error"), StoreFault)


def test_the_first_error_is_shown_not_the_follow_up() -> None:
    assert first_error(REFUSAL) == "ERROR: [NCC_EVRF001] unsupported operator"
    assert of_exit("k", "block", 1, REFUSAL).details["code"] == "NCC_EVRF001"
    warned = f"WARNING: see NCC_EARG001 for hints\n{REFUSAL}"
    assert of_exit("k", "block", 1, warned).details["code"] == "NCC_EVRF001"
    assert first_error("one\ntwo\n") == "two"
    assert first_error("") == "it said nothing"


def test_only_what_comes_and_goes_is_tried_again_in_the_same_run() -> None:
    tries = {
        kind: policy(of_exit("k", "b", status, log)).attempts
        for kind, status, log in (("refused", 1, REFUSAL), ("flaky", 70, ""), ("killed", -9, ""), ("failed", 1, "x"))
    }
    assert tries == {"refused": 1, "flaky": 3, "killed": 2, "failed": 1}


def test_a_long_log_keeps_its_beginning_and_its_end() -> None:
    text = "first line\n" + "x" * (2 * LOG_KEPT) + "\nlast line"
    kept = shortened(text)
    assert len(kept) < LOG_KEPT + 100
    assert kept.startswith("first line")
    assert kept.endswith("last line")
    assert "characters left out" in kept


def test_every_documented_code_has_its_advice() -> None:
    assert all(text and code.startswith("NCC_") for code, text in ADVICE.items())
    assert "MX format" in advice("NCC_EVRF041")
    assert "32-bit integers" in advice("NCC_EVRF061")
    assert "internal error" in advice("NCC_IBIR229")
    assert PAGE in advice("NCC_EZZZ001")


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "there is none"),
        (b"", "it is empty"),
        (b"\x02", "no more than a header"),
        (neff.header(0), "no more than a header"),
        (bytes(4096), "its header is empty"),
        (neff.header(3000) + bytes(2999), "cut off: 4023 of 4024 bytes"),
        (b"\x02" + bytes(4000), "0 bytes long, not 1024"),
        (neff.header(3000) + bytes(3000), None),
        (neff.header(3000, version=1) + bytes(3000), None),
        # A good NEFF of a later compiler must not be refused.
        (neff.header(3000, version=7) + bytes(10), None),
    ],
)
def test_a_neff_that_is_not_whole_is_told_by_its_header(
    tmp_path: Path, content: bytes | None, wrong: str | None
) -> None:
    path = tmp_path / "x.neff"
    if content is not None:
        path.write_bytes(content)
    found = neff.wrong(path)
    assert found is None if wrong is None else wrong in str(found)
