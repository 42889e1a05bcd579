"""neffcache init."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.options import Output, job_options, output_options, ref_options, store_option, trust_options

if TYPE_CHECKING:
    from neffcache.flows.trust import Trust


@click.command("init", epilog="Example:  neffcache init llama3_8b --lnc 2 --toolchain host --remote s3://bucket/prefix")
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option("--remote", help="s3://bucket/prefix, or the directory of another store [NEFFCACHE_REMOTE].")
@click.option("--jitter", type=click.FloatRange(0), default=0.0, help="First wait up to so many seconds, by chance.")
@click.option(
    "--on-remote-error",
    type=click.Choice(["stale-ok", "fail"]),
    default="stale-ok",
    show_default=True,
    help="When the remote cannot be asked: use what the store holds already, or fail.",
)
@click.option("--termination-log", type=click.Path(path_type=Path), help="Where the line goes too, if it exists.")
@job_options
@ref_options
@trust_options
@store_option
@output_options
def command(
    configs: tuple[str, ...],
    remote: str | None,
    jitter: float,
    on_remote_error: str,
    termination_log: Path | None,
    versions: list[str],
    trust: Trust,
    directory: str | None,
    choose: Callable[..., Any],
    output: Output,
) -> int:
    """For init containers: fetch what CONFIG needs into a volume and make its view, by ref, without torch.

    Prints one line of JSON. Run again it changes nothing. Other users may read what it makes.
    """
    from neffcache.errors import NeffcacheError
    from neffcache.flows import init as flow
    from neffcache.flows.settings import store_root
    from neffcache.store.local import LocalStore

    documents: list[dict[str, Any]] = []
    try:
        source = open_source(remote)
        root = store_root(directory, os.environ)
        store = LocalStore.open(root.value, writable=True, given=root.given, mode=0o755)
        flow.spread(jitter)
        for config in configs:
            try:
                request = choose(config, versions)
            except NeffcacheError as fault:
                documents.append(failed(config, fault))
                continue
            document = flow.init(request, store, source, trust=trust, on_remote_error=on_remote_error, note=output.note)
            documents.append(document)
    except NeffcacheError as fault:
        documents = [failed(config, fault) for config in configs]
    for document in documents:
        if document["exit_code"]:
            error = document.get("error", {})
            output.note(f"{document['config']}: {document['state']}: {document['reason']}")
            if error.get("hint"):
                output.note(f"hint: {error['hint']}")
    click.echo(flow.one_line(documents))
    try:
        flow.leave_message(termination_log or Path(flow.TERMINATION_LOG), documents)
    except OSError as fault:
        output.note(f"the termination log cannot be written: {os.strerror(fault.errno or 0)}")
    return flow.first_failure(documents)


def open_source(remote: str | None) -> Any:
    """What the setting `remote` names. Raises Usage, StoreFault, RemoteFault."""
    from neffcache.errors import Usage
    from neffcache.flows.settings import setting
    from neffcache.flows.sources import Directory

    value = setting("remote", remote, os.environ, "").value
    if not value:
        raise Usage("nothing says where to fetch from", hint="--remote s3://bucket/prefix, or NEFFCACHE_REMOTE")
    if "://" in value:
        raise Usage(f"{value} is not understood", hint="a directory")
    return Directory(Path(value))


def failed(config: str, fault: Any) -> dict[str, Any]:
    """The document of a configuration that could not be begun."""
    return {
        "config": config,
        "state": "ERROR",
        "reason": fault.message,
        "manifest": None,
        "cache_key": None,
        "view": None,
        "environment": {},
        "bytes": 0,
        "seconds": 0.0,
        "requests": 0,
        "error": fault.to_json(),
        "exit_code": fault.exit_code,
    }
