"""Graphs whose sizes depend on data: keyed without the data, run as written, and only when the manifest says so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan")

from neffcache.graph.settings import current_settings  # noqa: E402
from neffcache.key.canonical import digest  # noqa: E402
from neffcache.key.job import CompileComponents, compile_key  # noqa: E402
from neffcache.runtime import doors  # noqa: E402
from neffcache.runtime.report import RankReport, ReportFile  # noqa: E402
from neffcache.trace import torch_internals  # noqa: E402


class Refused(Exception):
    pass


def chosen(x: Any) -> Any:
    """As many rows as are positive."""
    return x[x > 0] * 2 + 1


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compile key of every graph that is captured while `chosen` is compiled for two inputs of one shape."""
    from neffcache.graph.text import canonical_text

    found: list[str] = []

    def compiler(kind: str, gm: Any, inputs: Any, settings: Any) -> Any:
        text = canonical_text(gm)
        assert text.symbolic
        assert text.data_dependent
        found.append(compile_key(CompileComponents(text=text.sha256, toolchain="a" * 64, env=digest(settings()))))
        return doors.operator_by_operator(gm)

    for data in ([1.0, -1.0, 2.0], [-1.0, -1.0, -1.0]):
        compiled(compiler)(torch.tensor(data))
    return found


def compiled(compiler: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return torch.compile(chosen, backend=torch_internals.aot_backend(compiler, current_settings), fullgraph=True)


@pytest.fixture(autouse=True)
def dynamo_as_before() -> Any:
    before = torch._dynamo.config.capture_dynamic_output_shape_ops
    yield
    torch._dynamo.config.capture_dynamic_output_shape_ops = before
    torch._dynamo.reset()


def rank_of(manifest_says: dict[str, Any], place: Path) -> doors.Doors:
    manifest: Any = SimpleNamespace(
        id="b" * 64,
        rank_classes=(),
        extra={"not_compiled": manifest_says},
        components={"toolchain": {"sha256": "a" * 64, "value": {}}},
    )
    rank: Any = object.__new__(doors.Doors)
    rank.manifest, rank.view, rank.reports = manifest, place, place
    rank.file = ReportFile(place, RankReport(0, 0, os.getpid()))
    rank.report, rank.on_miss, rank.toolchain = rank.file.report, "fail", "a" * 64
    rank.loaded, rank.not_compiled = {}, frozenset(manifest_says)
    return rank  # type: ignore[no-any-return]


def test_no_data_is_in_the_key(keys: list[str]) -> None:
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_a_rank_runs_it_operator_by_operator(keys: list[str], tmp_path: Path) -> None:
    rank = rank_of({keys[0]: {"name": "chosen"}}, tmp_path)
    run = compiled(rank.serve)
    for data in ([1.0, -1.0, 2.0], [-1.0, 4.0, 5.0], [-1.0, -1.0, -1.0]):
        assert run(torch.tensor(data)).tolist() == [2 * value + 1 for value in data if value > 0]
    assert rank.report.not_compiled == [keys[0]]
    assert rank.report.counts() == {"hits": 0, "misses": 0, "compiles": 0}
    rank.file.save()
    assert json.loads((tmp_path / "rank-0.json").read_text())["not_compiled"] == [keys[0]]


def test_one_that_the_manifest_does_not_name_is_a_miss(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any, fault: Any) -> None:
        raise Refused(fault.message)

    monkeypatch.setattr(doors, "refuse", refuse)
    monkeypatch.setattr(doors.fallback, "nearest_record", lambda *_: None)
    rank = rank_of({}, tmp_path)
    with pytest.raises(Exception, match="is not in the manifest"):
        compiled(rank.serve)(torch.tensor([1.0, -1.0]))
    assert [miss["compile_key"] for miss in rank.report.misses][:1] != []
    assert rank.report.not_compiled == []
