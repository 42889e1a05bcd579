"""neffcache init."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neffcache.cli.completing import offer
from neffcache.cli.options import Output, job_options, output_options, ref_options, store_option, trust_options

if TYPE_CHECKING:
    from neffcache.flows.remote import RemoteSettings
    from neffcache.flows.sources import Source
    from neffcache.flows.trust import Trust


@click.command("init", epilog="Example:  neffcache init llama3_8b --lnc 2 --toolchain host --remote s3://bucket/prefix")
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...", shell_complete=offer("config"))
@click.option("--remote", help="s3://bucket/prefix, or the directory of another store [NEFFCACHE_REMOTE].")
@click.option(
    "--channel", shell_complete=offer("channel"), help="The channel of refs [NEFFCACHE_CHANNEL, else current]."
)
@click.option("--jitter", type=click.FloatRange(0), default=0.0, help="First wait up to so many seconds, by chance.")
@click.option(
    "--on-remote-error",
    type=click.Choice(["stale-ok", "fail", "compile"]),
    help="When the remote cannot be asked: use what the store holds already [default], or fail, or call it a miss.",
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
    channel: str | None,
    on_remote_error: str | None,
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
    from neffcache.flows.remote import RemoteOptions, RemoteSettings
    from neffcache.flows.settings import store_root
    from neffcache.store.local import LocalStore

    documents: list[dict[str, Any]] = []
    try:
        options = RemoteOptions(remote=remote, channel=channel, on_remote_error=on_remote_error)
        settings = RemoteSettings.read(options, os.environ)
        said = settings.values["on_remote_error"]
        source = open_source(settings)
        root = store_root(directory, os.environ)
        store = LocalStore.open(root.value, writable=True, given=root.given, mode=0o755)
        flow.spread(jitter)
        for config in configs:
            try:
                request = choose(config, versions)
            except NeffcacheError as fault:
                documents.append(failed(config, fault))
                continue
            document = flow.init(
                request,
                store,
                source,
                channel=settings.channel,
                trust=trust,
                on_remote_error=said.value if said.given else "stale-ok",
                note=output.note,
            )
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


def open_source(settings: RemoteSettings) -> Source:
    """What the setting `remote` names. Raises Usage, StoreFault, RemoteFault."""
    from neffcache.errors import Usage
    from neffcache.flows.sources import Directory, Remote

    if not settings.remote:
        raise Usage("nothing says where to fetch from", hint="--remote s3://bucket/prefix, or NEFFCACHE_REMOTE")
    return Remote(settings.open()) if "://" in settings.remote else Directory(Path(settings.remote))


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
