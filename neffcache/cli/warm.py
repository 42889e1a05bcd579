"""neffcache warm."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import (
    Output,
    chosen_shard,
    compile_options,
    job_options,
    open_store,
    output_options,
    store_option,
    written_report,
)
from neffcache.cli.remote import URL_HELP, remote_options, summary, transfer_of

if TYPE_CHECKING:
    from neffcache.errors import NeffcacheError
    from neffcache.flows.warm import WarmResult


@click.command("warm", epilog="Example:  neffcache warm llama3_8b --lnc 2")
@click.argument("configs", nargs=-1, metavar="CONFIG...", shell_complete=offer("config"))
@click.option("--all", "every", is_flag=True, help="Every run that can be warmed.")
@click.option("--lint", is_flag=True, help="First prove that no graph holds a field that the key leaves out.")
@click.option("--sign-key", type=click.Path(path_type=Path), help="Sign each complete manifest with this private key.")
@click.option("--push", is_flag=True, help="Send each manifest to the remote when it is made.")
@click.option("--remote", help=URL_HELP)
@remote_options(more=False, writing=True)
@compile_options
@job_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    every: bool,
    lint: bool,
    sign_key: Path | None,
    push: bool,
    how: Any,
    shard: str | None,
    report: Path | None,
    directory: str | None,
    choose: Callable[[str], Any],
    settings: Callable[[], Any],
    output: Output,
) -> int:
    """Trace CONFIG at its real world size, compile each graph that has no record, and write its manifest.

    A manifest is complete only after a fresh process found and loaded all of it. Run again, it compiles nothing.
    With --native the job itself runs here, twice, and its compiler's own cache is kept.
    """
    from neffcache.cli.progress import progress_of
    from neffcache.cli.table import table
    from neffcache.errors import NeffcacheError
    from neffcache.flows.everything import Named, everything
    from neffcache.flows.request import CHANNEL, words
    from neffcache.flows.trust import sign
    from neffcache.flows.warm import warm
    from neffcache.store.signing import private_key

    entries = everything(os.environ) if every and not configs else [Named(name, None) for name in configs]
    if not entries:
        raise click.UsageError("give a CONFIG, or --all")
    key = None if sign_key is None else private_key(sign_key)
    store = open_store(directory, writable=True)
    sending = Sending(settings(), store, output) if push else None
    part = chosen_shard(shard, output)
    results: list[WarmResult] = []
    documents: list[dict[str, Any]] = []
    lines: list[str] = []
    rows: list[tuple[object, ...]] = []
    worst: NeffcacheError | None = None
    for entry in entries:
        name = entry.name
        if not entry.supported:
            assert entry.verdict is not None
            documents.append({"config": name, "state": "unsupported", "reason": entry.verdict.reason})
            rows.append((name, "unsupported", "", "", "", "", "", entry.verdict.reason[:80]))
            continue
        with progress_of(output) as progress:
            try:
                if lint:
                    _lint(choose(name), output)
                result = warm(choose(name), store, os.environ, how=how, progress=progress, shard=part)
                if key is not None and result.complete and result.ref is not None:
                    sign(store, key, CHANNEL, result.ref)
            except NeffcacheError as fault:
                if len(entries) == 1:
                    raise
                documents.append({"config": name, "state": "failed", **fault.to_json()})
                lines.append(f"{name}: {fault.message}")
                rows.append((name, "FAILED", "", "", "", "", "", fault.message[:80]))
                worst = worst or fault
                continue
        results.append(result)
        documents.append(result.to_json())
        if sending is not None and result.manifest is not None:
            documents[-1]["push"], kept_back = sending.send(name, result.job.key.cache_key)
            worst = worst or kept_back
        graphs = result.to_json()["graphs"]
        state = "complete" if result.complete else "INCOMPLETE"
        lines.append(
            f"{name}: {state}, {result.job.world_size} ranks, "
            f"{graphs['total']} graphs = {graphs['hit']} hit + {graphs['compiled']} compiled + "
            f"{graphs['failed']} failed + {graphs['skipped']} skipped; "
            f"{_seconds(result)}, total {result.total_seconds:.1f} s"
        )
        lines.append(f"  job key {result.job.key.cache_key}")
        if result.native is not None:
            lines.append(f"  {result.native.describe()}")
        if result.ref is not None:
            lines.append(f"  without TorchTitan: neffcache init {shlex.join(words(result.ref.request))}")
            if key is not None and result.complete:
                lines.append(f"  signed by {key.public.signer}")
        why = result.failures[0].message[:80] if result.failures else ""
        seconds = f"{result.total_seconds:.0f} s"
        counted = (graphs["total"], graphs["hit"], graphs["compiled"], graphs["failed"])
        rows.append((name, state, result.job.world_size, *counted, why or seconds))
        output.failed(result.failures, result.fault)
        worst = worst or result.fault
    if every:
        lines = table(
            ("config", "state", "ranks", "graphs", "hit", "compiled", "failed", ""),
            rows,
            right=("ranks", "graphs", "hit", "compiled", "failed"),
        )
    output.emit(documents[0] if len(configs) == 1 else documents, lines)
    code = 0 if worst is None else worst.exit_code
    if report is not None and results:
        from neffcache.flows.report import of_warm

        unwritten = written_report(report, [of_warm(result) for result in results], output)
        code = code or unwritten
    return code


def _seconds(result: WarmResult) -> str:
    if result.native is not None:
        return f"recorded in {result.native.record_seconds:.1f} s, replayed in {result.native.replay_seconds:.1f} s"
    return f"trace {result.trace_seconds:.1f} s, compile {result.compile_seconds:.1f} s"


class Sending:
    """Pushes of one warm. Who may not write is asked once; the rest is warmed all the same."""

    def __init__(self, settings: Any, store: Any, output: Output) -> None:
        self._remote, self._store, self._output = settings.open(), store, output
        self._refused: NeffcacheError | None = None

    def send(self, name: str, cache_key: str) -> tuple[dict[str, Any], NeffcacheError | None]:
        """The document of one push, and what kept it from being whole."""
        from neffcache.errors import NeffcacheError
        from neffcache.flows.push import push
        from neffcache.flows.pushable import of_key
        from neffcache.flows.remote import accounts

        fault = self._refused
        document: dict[str, Any] = {}
        if fault is None:
            source = of_key(self._store, cache_key, name)
            try:
                with transfer_of(self._output) as progress:
                    pushed = push(self._remote, self._store, [source] if source else [], progress=progress)
                document, fault = {**pushed.to_json(), **accounts(self._remote)}, pushed.fault()
                self._output.note(f"push: {summary(document)}")
            except NeffcacheError as error:
                fault = self._refused = error
        if fault is not None:
            self._output.note(f"push of {name} failed: {fault.message}")
            document["error"] = fault.to_json()
        return document, fault


def _lint(request: Any, output: Output) -> None:
    """Raise Mismatch when a field that the key leaves out moves a graph; say which fields a graph bakes in."""
    from neffcache.errors import Mismatch
    from neffcache.flows.lint import lint

    report = lint(request, os.environ, output.note)
    for entry in report.baked:
        output.note(f"lint: {entry} (each value of it is another compile)")
    for name, why in report.uncacheable.items():
        output.note(f"lint: {name} has no key and is not looked into: {why}")
    if report.moved:
        raise Mismatch(
            f"{len({entry.field for entry in report.moved})} fields that the job key leaves out reach the compiler: "
            f"{report.moved[0]}",
            hint="two jobs that differ in such a field would share a key; please report it",
            details=report.to_json(),
        )
    output.note(
        f"lint: {report.varied} fields varied in {report.traces} traces; no graph holds one that the key leaves out"
    )
