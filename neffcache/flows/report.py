"""One HTML file on what a warm compiled, when and where, and what would make it faster. It needs no other file.

`of_warm` and `of_files` say what happened; `render` draws it. Everything that comes from outside is escaped by jinja2.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffcache import __version__
from neffcache.compile.schedule import forecast
from neffcache.errors import NeffcacheError
from neffcache.flows.compiling import Attempt, Tally

if TYPE_CHECKING:
    from neffcache.flows.compile_files import CompiledFiles
    from neffcache.flows.warm import WarmResult

ROW = 30
"""Pixels a worker's row of the timeline is high."""


@dataclass(frozen=True)
class Graph:
    """One line of the table of graphs; seconds and bytes are None where nothing was compiled now."""

    compile_key: str
    name: str
    state: str
    nodes: int
    seconds: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Section:
    """What a page says of one job, or of one set of IR files."""

    title: str
    facts: Sequence[tuple[str, str]]
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    tally: Tally
    graphs: Sequence[Graph]
    failures: Sequence[NeffcacheError]
    complete: bool | None
    advice: Sequence[str] = field(default_factory=tuple)


def of_warm(result: WarmResult) -> Section:
    """The section of a warmed job."""
    job, tally = result.job, result.tally
    document = result.to_json()
    placement = job.request.placement
    facts = [
        ("job key", job.key.cache_key),
        ("toolchain", f"{job.request.toolchain} ({job.versions.get('compiler', '')})"),
        ("where it runs", f"{job.world_size} ranks, {placement.target} at LNC {placement.lnc}"),
        ("manifest", "none" if result.manifest is None else result.manifest.id),
    ]
    if result.shard is not None:
        facts.append(("shard", f"{result.shard} ({result.shard.origin})"))
    failed = {str(fault.details.get("compile_key")) for fault in result.failures}
    graphs = [
        _graph(key, graph.name, graph.nodes, tally, failed, hit=result.manifest is not None)
        for key, graph in result.graphs.items()
    ]
    seconds = dict(document["seconds"])
    return _section(
        job.request.config, facts, document["graphs"], seconds, tally, graphs, result.failures, result.complete
    )


def of_files(result: CompiledFiles) -> Section:
    """The section of `neffcache compile`."""
    document = result.to_json()
    facts = [
        ("compiler", document["compiler"]),
        ("target", f"{result.placement.target} at LNC {result.placement.lnc}"),
        ("options", " ".join(result.options.tokens) or "none"),
    ]
    graphs = [
        Graph(item.key, item.name, result.state(item.key), item.nodes, *result.tally.costs.get(item.key, (None, None)))
        for item in {item.key: item for item in result.files}.values()
    ]
    return _section(
        "IR files", facts, document["graphs"], document["seconds"], result.tally, graphs, result.tally.failures, None
    )


def _graph(key: str, name: str, nodes: int, tally: Tally, failed: set[str], *, hit: bool) -> Graph:
    if key in tally.costs:
        return Graph(key, name, "compiled", nodes, *tally.costs[key])
    tried = any(attempt.compile_key == key for attempt in tally.attempts)
    state = "failed" if key in failed else ("skipped" if tried or not hit else "hit")
    return Graph(key, name, state, nodes, None, None)


def _section(
    title: str,
    facts: Sequence[tuple[str, str]],
    counts: Mapping[str, int],
    seconds: Mapping[str, float],
    tally: Tally,
    graphs: Iterable[Graph],
    failures: Sequence[NeffcacheError],
    complete: bool | None,
) -> Section:
    shown = sorted(graphs, key=lambda item: (-(item.seconds or 0.0), item.state, -item.nodes, item.compile_key))
    return Section(title, facts, counts, seconds, tally, shown, failures, complete, advise(tally, seconds))


def advise(tally: Tally, seconds: Mapping[str, float]) -> list[str]:
    """What would make it faster, from what was measured; the most worth first."""
    found: list[tuple[float, str]] = []
    wall = max((attempt.ended for attempt in tally.attempts), default=0.0)
    if wall <= 0.0 or not tally.costs:
        return ["Nothing was compiled: there is nothing to make faster."] if not tally.failures else []
    units = sorted(((took, size) for took, size in tally.costs.values()), reverse=True)
    longest = units[0][0]
    busy = sum(attempt.ended - attempt.began for attempt in tally.attempts)
    workers = max(1, tally.workers)
    budget = None if tally.capacity is None else tally.capacity.budget
    doubled = forecast(units, 2 * workers, None).seconds
    here = forecast(units, workers, budget).seconds
    if longest >= 0.9 * here and len(units) > 1:
        found.append(
            (
                longest,
                f"The longest graph alone takes {longest:.0f} s of {wall:.0f} s: more workers would not help. Make "
                "that graph smaller (blocks instead of the whole model, more pipeline or tensor parallelism, -O1).",
            )
        )
    elif here - doubled > 0.1 * here:
        found.append(
            (
                here - doubled,
                f"Twice as many workers ({2 * workers}) would take about {_span(doubled)} instead of {_span(here)}.",
            )
        )
    if budget is not None and (free := forecast(units, workers, None).seconds) < 0.9 * here:
        found.append(
            (
                here - free,
                f"Memory keeps compiles waiting: with room for all {workers} workers it would be {_span(free)}.",
            )
        )
    lost = sum(attempt.ended - attempt.began for attempt in tally.attempts if attempt.outcome != "done")
    if lost > 0.05 * busy:
        kinds = sorted({attempt.outcome for attempt in tally.attempts if attempt.outcome != "done"})
        found.append((lost / workers, f"{_span(lost)} of compiling came to nothing ({', '.join(kinds)})."))
    idle = workers * wall - busy
    if idle > 0.2 * workers * wall:
        found.append(
            (
                idle / workers,
                f"Workers were idle {idle / (workers * wall):.0%} of the time: {_idle_reason(tally, workers)}",
            )
        )
    trace = seconds.get("trace", 0.0)
    if trace > wall:
        found.append(
            (trace, f"Tracing took longer ({_span(trace)}) than compiling: several jobs at once share nothing of it.")
        )
    if not found:
        return [f"Nothing stands out: {workers} workers were busy {busy / (workers * wall):.0%} of {_span(wall)}."]
    return [text for _, text in sorted(found, reverse=True)]


def _idle_reason(tally: Tally, workers: int) -> str:
    if any(attempt.outcome == "killed" for attempt in tally.attempts):
        return "after a kill fewer run at once."
    if len(tally.costs) < 2 * workers:
        return "there are few graphs for so many workers."
    return "the last graphs are uneven, or memory was short."


def write(path: Path, sections: Sequence[Section]) -> None:
    """Write the page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(render(sections))
    temporary.replace(path)


def render(sections: Sequence[Section]) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("neffcache.flows"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(span=_span, size=_size)
    return environment.get_template("report.html").render(
        sections=[
            {"data": section, "lanes": lanes(section.tally.attempts), "axis": axis(section)} for section in sections
        ],
        version=__version__,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        row=ROW,
    )


@dataclass(frozen=True)
class Bar:
    """One attempt on the timeline: left edge and width in percent."""

    left: float
    width: float
    attempt: Attempt


def lanes(attempts: Sequence[Attempt]) -> list[tuple[str, list[Bar]]]:
    """(worker, bars) in the order of the workers' names; a worker that ran several at once gets several rows."""
    end = max((attempt.ended for attempt in attempts), default=0.0) or 1.0
    rows: dict[str, list[list[Attempt]]] = {}
    for attempt in sorted(attempts, key=lambda item: item.began):
        free = rows.setdefault(attempt.worker, [])
        row = next((each for each in free if each[-1].ended <= attempt.began + 1e-3), None)
        if row is None:
            free.append(row := [])
        row.append(attempt)
    return [
        (worker, [Bar(100 * a.began / end, max(0.15, 100 * (a.ended - a.began) / end), a) for a in row])
        for worker in sorted(rows, key=_natural)
        for row in rows[worker]
    ]


def axis(section: Section) -> list[tuple[float, str]]:
    """(place in percent, label) of the marks under a timeline: at most ten, at round numbers of seconds."""
    end = max((attempt.ended for attempt in section.tally.attempts), default=0.0)
    if end <= 0:
        return []
    step = 10 ** math.floor(math.log10(end))
    for factor in (0.1, 0.2, 0.5, 1, 2, 5):
        if end / (step * factor) <= 8:
            step *= factor
            break
    return [(100 * number * step / end, _span(number * step)) for number in range(int(end / step) + 1)]


def _natural(name: str) -> tuple[str, int]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(count: Any) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError
