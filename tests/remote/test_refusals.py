"""What another machine says of a graph that its compiler refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from neffcache.compile.toolchain import CompileRequest
from neffcache.flows.compiling import _Refusals
from neffcache.remote import refusals
from neffcache.remote.refusals import Refusal

KEY = "1" * 32
GOOD = Refusal(1, KEY, "t" * 64, "NCC_EVRF004", 1_700_000_000)


def remote_with(data: bytes | None) -> SimpleNamespace:
    return SimpleNamespace(client=SimpleNamespace(read=lambda name: None if data is None else (data, "etag")))


def test_what_was_put_is_read() -> None:
    kept: dict[str, bytes] = {}

    def put(name: str, data: bytes, sha256: str, *, size: int, if_absent: bool) -> str | None:
        assert if_absent, "the first one's word stays"
        return None if name in kept else kept.setdefault(name, data) and "etag"

    assert refusals.put(SimpleNamespace(client=SimpleNamespace(put=put)), GOOD)  # type: ignore[arg-type]
    assert not refusals.put(SimpleNamespace(client=SimpleNamespace(put=put)), GOOD)  # type: ignore[arg-type]
    [(name, data)] = kept.items()
    assert name == f"failures/{KEY}.json"
    assert refusals.get(remote_with(data), KEY) == GOOD  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"no JSON",
        b"[]",
        msgspec.json.encode({**msgspec.to_builtins(GOOD), "schema": 2}),
        msgspec.json.encode({**msgspec.to_builtins(GOOD), "compile_key": "2" * 32}),
        msgspec.json.encode({**msgspec.to_builtins(GOOD), "code": "rm -rf"}),
        msgspec.json.encode({**msgspec.to_builtins(GOOD), "at": "yesterday"}),
    ],
)
def test_anything_else_is_no_refusal(data: bytes | None) -> None:
    assert refusals.get(remote_with(data), KEY) is None  # type: ignore[arg-type]


def test_another_compiler_s_word_does_not_count(tmp_path: Path) -> None:
    request = CompileRequest(KEY, "g", tmp_path / "payload", {}, {})
    assert _Refusals(None, "u" * 64).told(request, GOOD) is None
    fault = _Refusals(None, "t" * 64).told(request, GOOD)
    assert fault is not None
    assert fault.details["code"] == "NCC_EVRF004"
    assert fault.details["replayed"], "it is told, not compiled"
