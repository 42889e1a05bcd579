"""Prove that neutral fields are neutral: trace again with all of them changed at once, and compare.

Both the captured graphs and the record of eager operators (operator, shapes, scalars) must be the same. On a
difference the fields are halved until the one that moves something is named. Fields that count but that no graph should
hold (learning rate, clipping) are varied too: a graph that bakes one in is compiled again for each of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from neffcache.errors import Unsupported
from neffcache.flows.request import Request
from neffcache.flows.resolve import Job, first_line, resolve
from neffcache.flows.workers import Series, aside, scratch

MAX_CULPRITS = 8


@dataclass(frozen=True)
class Moved:
    """One line that another value of a field changes: in a captured graph, or among the eager operators."""

    field: str
    where: str
    line: int
    before: str
    after: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.field} moves {self.where}, line {self.line}: {self.before.strip()} -> {self.after.strip()}"


@dataclass
class LintReport:
    """`moved` breaks a promise of the key; `baked` costs a compile for each value; `eager` is expected, and counted.

    `uncacheable` are graphs that have no key, by name with the reason: nothing is said of what they hold.
    """

    config: str
    varied: int = 0
    traces: int = 0
    moved: list[Moved] = field(default_factory=list)
    baked: list[Moved] = field(default_factory=list)
    eager: int = 0
    uncacheable: dict[str, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not self.moved

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "clean": self.clean,
            "varied": self.varied,
            "traces": self.traces,
            "moved": [entry.to_json() for entry in self.moved],
            "baked": [entry.to_json() for entry in self.baked],
            "eager_operators_with_watched_values": self.eager,
            "uncacheable": self.uncacheable,
        }


Trace = dict[str, Any]


def lint(
    request: Request, environ: Mapping[str, str], progress: Callable[[str], None], *, job: Job | None = None
) -> LintReport:
    """Lint one configuration; raises NeffcacheError when it cannot be traced at all."""
    with scratch(aside(environ)) as place:
        if job is None:
            progress(first_line(request))
            job = resolve(request, environ, place)
        if job.called:
            raise Unsupported(
                f"{request.config} is a callable, and --lint is for configurations of TorchTitan: the key of a "
                "callable leaves out nothing that could be varied",
                hint="warm it without --lint",
            )
        report = LintReport(request.config)

        question = {"arguments": list(job.trace_arguments), "rank": 0, "world_size": job.world_size, "cpu": True}
        with Series("neffcache.flows.worker_trace", job.base(environ), place) as series:

            def traced(changes: Mapping[str, Any]) -> Trace:
                report.traces += 1
                into = str(place / f"lint-{report.traces}")
                return series.ask({**question, "into": into, "changes": dict(changes)})

            judge(report, traced, progress)
        return report


def judge(report: LintReport, traced: Callable[[Mapping[str, Any]], Trace], progress: Callable[[str], None]) -> None:
    """Trace with other values and enter what they move into the report. `traced(changes)` is one trace."""
    known: dict[frozenset[str], Trace] = {}

    def once(changes: Mapping[str, Any]) -> Trace:
        names = frozenset(changes)
        if names not in known:
            known[names] = traced(changes)
        return known[names]

    progress("tracing as configured")
    base = once({})
    neutral, watched = dict(base["neutral"]), dict(base["watched"])
    report.varied = len(neutral) + len(watched)
    report.uncacheable = dict(base["uncacheable"])
    progress(f"tracing with {len(neutral)} neutral fields changed at once")
    for name, alone, together in _culprits(base, neutral, once, same, progress):
        report.moved += _found(name, base, alone, together, eager=True)
    progress(f"tracing with {len(watched)} watched fields changed at once")
    report.eager = len(set(base["eager"]) ^ set(once(watched)["eager"]))
    for name, alone, together in _culprits(base, watched, once, same_graphs, progress):
        report.baked += _found(name, base, alone, together, eager=False)


def _found(name: str, base: Trace, alone: Trace, together: Trace, *, eager: bool) -> list[Moved]:
    """What a field moves: alone, or only together with others. Never nothing."""
    return (
        differences(name, base, alone, eager=eager)
        or differences(f"{name} with other fields", base, together, eager=eager)
        or [Moved(f"{name} with other fields", "the graphs", 0, "one order", "another")]
    )


Alike = Callable[[Trace, Trace], bool]


def same(a: Trace, b: Trace) -> bool:
    """Whether two traces have the same graphs and the same eager operators."""
    return same_graphs(a, b) and bool(a["eager"] == b["eager"])


def same_graphs(a: Trace, b: Trace) -> bool:
    """Whether two traces have the same graphs."""
    return _graphs(a) == _graphs(b)


def _graphs(trace: Trace) -> list[tuple[str, str, str]]:
    return [(graph["phase"], graph["text"], graph["env"]) for graph in trace["graphs"]]


def _culprits(
    base: Trace,
    changes: dict[str, Any],
    traced: Callable[[Mapping[str, Any]], Trace],
    alike: Alike,
    progress: Callable[[str], None],
) -> Iterator[tuple[str, Trace, Trace]]:
    """The fields of `changes` that move something, by halving: name, the trace with it alone, with all.

    Each is taken out of `changes` once it is found.
    """
    for _ in range(MAX_CULPRITS):
        together = traced(changes)
        if not changes or alike(base, together):
            return
        names = sorted(changes)
        while len(names) > 1:
            progress(f"something moves: halving {len(names)} fields")
            half = names[: len(names) // 2]
            moves = not alike(base, traced({name: changes[name] for name in half}))
            names = half if moves else names[len(names) // 2 :]
        yield names[0], traced({names[0]: changes.pop(names[0])}), together


def differences(name: str, base: Trace, other: Trace, *, eager: bool = True) -> list[Moved]:
    """Every line that differs, graph by graph, its phase and settings, and eager operators when they are asked for."""
    found: list[Moved] = []
    for left, right in zip_longest(base["graphs"], other["graphs"]):
        if left is None or right is None:
            graph = left or right
            found.append(Moved(name, graph["name"], 0, "a graph" if left else "", "" if left else "a graph"))
            continue
        for what in ("phase", "env"):
            if left[what] != right[what]:
                found.append(Moved(name, left["name"], 0, f"{what} {left[what]}", f"{what} {right[what]}"))
        texts = [Path(graph["text_file"]).read_text().splitlines() for graph in (left, right)]
        for line, (before, after) in enumerate(zip_longest(*texts, fillvalue=""), start=1):
            if before != after:
                found.append(Moved(name, left["name"], line, before, after))
    if eager and base["eager"] != other["eager"]:
        gone = sorted(set(base["eager"]) - set(other["eager"])) or [""]
        came = sorted(set(other["eager"]) - set(base["eager"])) or [""]
        found += [
            Moved(name, "the eager operators", 0, before, after)
            for before, after in zip_longest(gone, came, fillvalue="")
        ]
    return found
