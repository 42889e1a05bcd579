"""Options that several verbs share, and how a verb prints."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer

if TYPE_CHECKING:
    from neffcache.errors import NeffcacheError
    from neffcache.flows.report import Section
    from neffcache.flows.request import Request
    from neffcache.flows.shards import Shard
    from neffcache.store.local import LocalStore


@dataclass(frozen=True)
class Output:
    """Where things go: with --json one document on stdout and everything else on stderr; -q leaves notes out."""

    json: bool
    quiet: bool
    verbose: bool

    def note(self, text: str) -> None:
        """Something to know while the command works: always on stderr."""
        if not self.quiet:
            click.echo(text, err=True)

    def failed(self, failures: Sequence[NeffcacheError], fault: NeffcacheError | None) -> int:
        """Say every failed graph, the first one first, and what the command ends with; its exit code."""
        for each in failures:
            self.note(f"failed: {each.message}")
            if each.details.get("log_file"):
                self.note(f"  log: {each.details['log_file']}")
            if each.hint:
                self.note(f"  hint: {each.hint}")
        if fault is None:
            return 0
        self.note(f"error: {fault.message}")
        if fault.hint:
            self.note(f"hint: {fault.hint}")
        return fault.exit_code

    def emit(self, document: Any, lines: Sequence[str]) -> None:
        """The command's result: the document with --json, else the lines."""
        if self.json:
            click.echo(json.dumps(document, indent=None))
        else:
            for line in lines:
                click.echo(line)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json, -q, -v as one `output` argument."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, everything else on stderr.")
    @click.option("-q", "--quiet", is_flag=True, help="No notes.")
    @click.option("-v", "--verbose", is_flag=True, help="More notes.")
    @functools.wraps(command)
    def with_output(*args: Any, as_json: bool, quiet: bool, verbose: bool, **given: Any) -> Any:
        return command(*args, output=Output(as_json, quiet, verbose), **given)

    return with_output


_JOB_OPTIONS = (
    click.option("--lnc", type=click.IntRange(1, 2), help="Logical NeuronCore configuration."),
    click.option("--target", shell_complete=offer("target"), help="trn1, trn2, trn3 or cpu."),
    click.option("--instance", shell_complete=offer("instance"), help="Instance type, such as trn2.48xlarge."),
    click.option("--nodes", type=click.IntRange(1), help="Number of nodes."),
    click.option("--world-size", type=click.IntRange(1), help="Ranks; else from instance, LNC and nodes."),
    click.option(
        "--toolchain",
        type=click.Choice(["host", "neuron", "auto"]),
        default="auto",
        show_default=True,
        help="Compiler.",
    ),
    click.option("--native", is_flag=True, help="Keep and serve the compiler's own cache, not graphs compiled by us."),
    click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="A TorchTitan option; repeatable."),
    click.option("--option", "options", multiple=True, metavar="OPTION", help="A compiler option (--option=-O1)."),
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The contract's options that make a request, as one `choose` argument: a config's name -> its Request.

    `choose(config, versions)` is the request by ref: the toolchain is the one that was said, or that is installed.
    """

    @functools.wraps(command)
    def with_job(*args: Any, **given: Any) -> Any:
        names = ("lnc", "target", "instance", "nodes", "world_size", "toolchain", "native", "sets", "options")
        chosen = {name: given.pop(name) for name in names}

        def choose(config: str, versions: Sequence[str] | None = None) -> Request:
            from neffcache.compile.toolchains import choose as choose_toolchain
            from neffcache.flows.request import make_request
            from neffcache.flows.resolve import said_toolchain

            name = chosen["toolchain"]
            toolchain = choose_toolchain(name) if versions is None else said_toolchain(name)
            made = {**chosen, "toolchain": toolchain, "versions": versions or ()}
            request = make_request(config, environ=os.environ, **made)
            if name == "auto" and toolchain not in ("", "host") and request.placement.target == "cpu":
                # A job for CPUs is one for the host, whatever else is installed.
                return make_request(config, environ=os.environ, **{**made, "toolchain": "host"})
            return request

        return command(*args, choose=choose, **given)

    for option in reversed(_JOB_OPTIONS):
        with_job = option(with_job)
    return with_job


def ref_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--version-of as one `versions` argument: what a request by ref must say besides the options of a job."""

    @click.option(
        "--version-of",
        "said",
        multiple=True,
        metavar="NAME=VERSION",
        shell_complete=offer("version"),
        help="By ref: a version that the job was warmed with, as `neffcache show` tells; repeatable "
        "[NEFFCACHE_VERSIONS].",
    )
    @functools.wraps(command)
    def with_versions(*args: Any, said: tuple[str, ...], **given: Any) -> Any:
        from neffcache.flows.settings import several

        return command(*args, versions=several("versions", said, os.environ), **given)

    return with_versions


def trust_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--require-signature and --min-serial as one `trust` argument."""

    @click.option(
        "--require-signature",
        "keys",
        multiple=True,
        metavar="KEY",
        help="Refuse what this public key did not sign: ed25519:... or a file; repeatable, one of them must have "
        "[NEFFCACHE_REQUIRE_SIGNATURE].",
    )
    @click.option(
        "--min-serial",
        type=click.IntRange(0),
        envvar="NEFFCACHE_MIN_SERIAL",
        help="With --require-signature: refuse a ref with a smaller serial.",
    )
    @functools.wraps(command)
    def with_trust(*args: Any, keys: tuple[str, ...], min_serial: int | None, **given: Any) -> Any:
        from neffcache.flows.settings import several
        from neffcache.flows.trust import trust_of

        trust = trust_of(several("require_signature", keys, os.environ), min_serial)
        return command(*args, trust=trust, **given)

    return with_trust


_COMPILE_OPTIONS = (
    click.option("--jobs", type=click.IntRange(1), envvar="NEFFCACHE_JOBS", help="Compiles at once, whatever fits."),
    click.option(
        "--executor",
        default="local",
        show_default=True,
        envvar="NEFFCACHE_EXECUTOR",
        metavar="WHERE",
        help="local, or a Dask cluster: dask://host:port.",
    ),
    click.option(
        "--time-limit",
        type=click.FloatRange(min=1),
        default=4 * 3600.0,
        show_default=True,
        envvar="NEFFCACHE_TIME_LIMIT",
        metavar="SECONDS",
        help="After which one compile is ended.",
    ),
    click.option("--retry-failed", is_flag=True, help="Try again what the compiler refused before."),
    click.option(
        "--share",
        envvar="NEFFCACHE_SHARE",
        metavar="s3://BUCKET/PREFIX",
        help="Compile with others: lease each graph there, adopt what they made, push what is made here.",
    ),
    click.option("--shard", metavar="I/N", help="Compile part I, from 0, of N; none: all, whatever engine runs this."),
    click.option(
        "--report",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE.html",
        help="Write a page on what was compiled when, and what would make it faster.",
    ),
)


def compile_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that compiles: `how` (flows.compiling.How), `shard` and `report`."""

    @functools.wraps(command)
    def with_how(*args: Any, **given: Any) -> Any:
        from neffcache.flows.compiling import How

        names = ("jobs", "executor", "time_limit", "retry_failed", "share")
        return command(*args, how=How(**{name: given.pop(name) for name in names}), **given)

    for option in reversed(_COMPILE_OPTIONS):
        with_how = option(with_how)
    return with_how


def chosen_shard(option: str | None, output: Output) -> Shard | None:
    """The shard of --shard or of the engine that runs this, said aloud."""
    from neffcache.flows.shards import choose, unsaid

    shard = choose(option, os.environ)
    if shard is not None and shard.origin != "--shard":
        output.note(f"shard {shard} ({shard.origin}); --shard none compiles everything here")
    elif option is None and (told := unsaid(os.environ)):
        output.note(f"warning: {told}")
    return shard


def written_report(path: Path, sections: Sequence[Section], output: Output) -> int:
    """Write the page; 2 when it cannot be written there. What was compiled is kept either way."""
    from neffcache.flows.report import write

    try:
        write(path, sections)
    except OSError as fault:
        output.note(f"error: the report cannot be written to {path}: {fault.strerror}")
        return 2
    output.note(f"report: {path}")
    return 0


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--dir", "directory", help="Local store [NEFFCACHE_DIR, else $XDG_CACHE_HOME/neffcache].")(
        command
    )


def open_store(directory: str | None, *, writable: bool) -> LocalStore:
    """The local store of the settings. A store that cannot be written is opened to read when that is enough."""
    from neffcache.flows.settings import store_root
    from neffcache.store.local import LocalStore

    root = store_root(directory, os.environ)
    return LocalStore.open(root.value, writable=writable, given=root.given)


def open_to_run(directory: str | None) -> LocalStore:
    """Writable where that is possible, read-only where it is not: hits need no write."""
    from neffcache.flows.settings import store_root
    from neffcache.store.local import LocalStore

    root = store_root(directory, os.environ)
    path = Path(root.value)
    writable = os.access(path, os.W_OK) if path.exists() else True
    return LocalStore.open(root.value, writable=writable, given=root.given)


def open_to_mend(directory: str | None) -> LocalStore:
    """Writable where it exists and can be written, so that damage can be quarantined; nothing is made."""
    from neffcache.flows.settings import store_root
    from neffcache.store.local import LocalStore

    root = store_root(directory, os.environ)
    writable = os.access(Path(root.value), os.W_OK)
    return LocalStore.open(root.value, writable=writable, given=root.given)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
