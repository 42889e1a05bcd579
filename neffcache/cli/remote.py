"""Options of the verbs that speak to a remote, and how a transfer shows what it does."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from neffcache.cli.options import Output, size
from neffcache.flows.remote import ON_ERROR, RemoteOptions, RemoteSettings
from neffcache.remote.transfer import Progress

URL_HELP = "s3://bucket/prefix [NEFFCACHE_REMOTE]."
SAID = "settings"
"""What `--remote` without a URL means where it may stand alone: the remote of the settings."""

_BASIC = (
    click.option("--remote-timeout", type=click.FloatRange(0.1), help="Seconds without a sign of life [60]."),
    click.option("--endpoint-url", help="Another S3 than Amazon's [AWS_ENDPOINT_URL]."),
    click.option("--anonymous", is_flag=True, default=None, help="No credentials: a public bucket."),
)
_MORE = (
    click.option("--transfers", type=click.IntRange(1), help="Requests at once [8]."),
    click.option("--region", help="The bucket's region [AWS_REGION]."),
    click.option("--path-style", is_flag=True, default=None, help="The bucket's name in the path."),
    click.option("--requester-pays", is_flag=True, default=None, help="The requester pays."),
)
_WRITING = (
    click.option("--sse", type=click.Choice(["AES256", "aws:kms"]), help="Encryption of what is written."),
    click.option("--kms-key", help="Key of --sse aws:kms."),
)
POLICY = click.option(
    "--on-remote-error",
    type=click.Choice(ON_ERROR),
    help="When the remote fails: end, go on with a complete local manifest, or go on in any case [fail].",
)


def remote_options(
    *, writing: bool = False, more: bool = True, stands_alone: bool = False
) -> Callable[..., Callable[..., Any]]:
    """The options of a remote as one `settings` argument: a function that reads them all when the verb works.

    A verb's own --channel arrives as `channel_asked`; with `stands_alone` whether --remote was said as `remote_asked`.
    """
    chosen = [*_BASIC, *(_MORE if more else ()), *(_WRITING if writing else ())]
    names = ("remote", "channel", "on_remote_error", "remote_timeout", "transfers", "region", "endpoint_url",
             "path_style", "anonymous", "requester_pays", "sse", "kms_key")  # fmt: skip

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_remote(*args: Any, **given: Any) -> Any:
            said = {name: given.pop(name) for name in names if name in given}
            url = said.get("remote")

            def settings() -> RemoteSettings:
                return RemoteSettings.read(
                    RemoteOptions(**{**said, "remote": None if url == SAID else url}), os.environ
                )

            if "channel" in said:
                given["channel_asked"] = said["channel"]
            if stands_alone:
                given["remote_asked"] = url is not None
            return command(*args, settings=settings, **given)

        for option in reversed(chosen):
            with_remote = option(with_remote)
        return with_remote

    return decorate


class MayStandAlone(click.Command):
    """A command whose `--remote` takes a URL or none: `--remote s3://b/p`, or `--remote` for that of the settings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word, after in zip(args, [*args, ""][1:], strict=True):
            alone = word == "--remote" and not after.startswith("s3:")
            words.append(f"--remote={SAID}" if alone else word)
        return super().parse_args(ctx, words)


class Lines(Progress):
    """A transfer as lines on stderr, at most one each `EVERY` seconds."""

    EVERY = 5.0

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._doing = ""
        self._total = self._done = 0
        self._started = self._told = 0.0

    def note(self, text: str) -> None:
        self._output.note(text)

    def begin(self, doing: str, count: int, total: int) -> None:
        self._doing, self._total, self._done = doing, total, 0
        self._started = self._told = time.monotonic()
        if count:
            self.note(f"{doing} {count} files, {size(total)}")

    def moved(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told >= self.EVERY:
                self._told = now
                self.note(f"  {self._line(now)}")

    def end(self) -> None:
        seconds = time.monotonic() - self._started
        if self._done:
            self.note(f"  {size(self._done)} in {seconds:.1f} s, {size(self._done / max(seconds, 1e-6))}/s")

    def _line(self, now: float) -> str:
        rate = self._done / max(now - self._started, 1e-6)
        left = max(self._total - self._done, 0) / max(rate, 1e-6)
        return f"{self._doing}: {size(self._done)} of {size(self._total)}, {size(rate)}/s, {left:.0f} s left"


class Bar(Lines):
    """A transfer as a bar on a terminal, with bytes, rate and time left."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._bar: Any = None
        self._task: Any = None

    def begin(self, doing: str, count: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.end()
        if not count:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(doing, total=total)
        self._bar.start()

    def moved(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextlib.contextmanager
def transfer_of(output: Output) -> Iterator[Lines]:
    """The progress of transfers for this terminal."""
    progress = Bar(output) if sys.stderr.isatty() and not output.quiet and not output.json else Lines(output)
    try:
        yield progress
    finally:
        if isinstance(progress, Bar):
            progress.end()


def summary(document: dict[str, Any]) -> str:
    """One line on what was transferred."""
    objects, moved = document["objects"], document["bytes"]
    return (
        f"{objects['planned']} planned = {objects['transferred']} transferred + {objects['present']} present + "
        f"{objects['failed']} failed; {size(moved['transferred'])} in {document['seconds']:.1f} s, "
        f"{document['requests']['total']} requests"
    )
