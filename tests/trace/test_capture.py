"""What is kept of the graphs of a run, and how a payload brings what a compile worker needs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from neffcache.errors import Unsupported
from neffcache.graph import payload
from neffcache.graph.uncacheable import Uncacheable
from neffcache.trace.capture import Capture
from tests.graph.building import Build

pytestmark = pytest.mark.fast


class Stranger:
    """A value that no text can be made of."""


def test_a_graph_without_a_text_is_named_with_the_reason_and_never_kept() -> None:
    """K12, twice: no key is made up, least of all another one each time."""
    capture = Capture()
    for _ in range(2):
        build = Build()
        gm = build.output(build.call(torch.ops.aten.add.Tensor, build.input(), Stranger()))
        capture.compiler("forward", gm, [], dict)
    assert not capture.graphs
    [(name, why)] = capture.uncacheable.items()
    assert name.startswith("graph.forward")
    assert "Stranger" in why


def module_of_ours(place: Path, name: str, text: str) -> Any:
    (place / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


WAYS = {
    "custom_op": """
import torch
from torch import library as lib
@lib.custom_op("NAME::run", mutates_args=())
def run(x: torch.Tensor) -> torch.Tensor:
    return x / 2
@run.register_fake
def _(x):
    return torch.empty_like(x)
""",
    "library": """
from torch import library as lib
library = lib.Library("NAME", "DEF")
library.define("run(Tensor x) -> Tensor")
@lib.impl(library, "run", "CompositeExplicitAutograd")
def run(x):
    return x / 2
""",
    "define": """
import torch
from torch import library as lib
lib.define("NAME::run", "(Tensor x) -> Tensor")
@lib.register_fake("NAME::run")
def _(x):
    return torch.empty_like(x)
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_payload_names_the_module_that_defines_an_operator(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ours_by_{way}"
    monkeypatch.syspath_prepend(tmp_path)
    module_of_ours(tmp_path, name, WAYS[way].replace("NAME", name))
    build = Build()
    gm = build.output(
        build.call(getattr(torch.ops, name).run.default, build.call(torch.ops.aten.neg.default, build.input()))
    )
    packed = payload.pack(gm, payload_text(gm))
    assert payload.defining_modules(payload.unpack(packed).module) == [name]
    imported: list[str] = []
    monkeypatch.setattr(payload.importlib, "import_module", imported.append)
    payload.unpack(packed)
    assert imported == [name]
    monkeypatch.undo()
    del sys.modules[name]
    with pytest.raises(ImportError):
        payload.unpack(packed)


def payload_text(gm: Any) -> Any:
    from neffcache.graph.text import canonical_text

    return canonical_text(gm)


def test_an_operator_that_the_program_itself_defines_cannot_be_compiled_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "defining_module", lambda _: "__main__")
    monkeypatch.syspath_prepend(tmp_path)
    module_of_ours(tmp_path, "ours_in_main", WAYS["custom_op"].replace("NAME", "ours_in_main"))
    build = Build()
    gm = build.output(build.call(torch.ops.ours_in_main.run.default, build.input()))
    with pytest.raises(Uncacheable, match="defined in __main__") as caught:
        payload.pack(gm, payload_text(gm))
    assert isinstance(caught.value, Unsupported)
