"""The archive of `doctor --bundle`: what a maintainer asks for in a support thread, redacted, bounded, always the same
names. Nothing of it is written before all of it was checked.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neffcache import __version__
from neffcache.errors import Bug, NeffcacheError, StoreFault, Usage
from neffcache.flows.doctor import Report
from neffcache.flows.env import RUNS
from neffcache.flows.listing import manifest_rows, ref_rows
from neffcache.flows.redact import REMOVED, SET, Redactor, is_secret_name
from neffcache.flows.settings import FILE
from neffcache.key.environment import PREFIXES
from neffcache.store.files import remove
from neffcache.store.index import Index
from neffcache.store.local import LocalStore

TEXT_BYTES = 256_000
"""Of one log, report or file: its beginning and its end."""

ROWS = 200
"""Manifests, refs and refusals that are listed."""

LOGS, RUN_DIRECTORIES, RANKS = 10, 5, 8
"""Logs of refused compiles, launches, and reports of a launch; the newest."""

PACKAGES = (
    *("torch", "torchtitan", "torch-neuronx", "neuronx-cc", "nki", "libneuronxla", "torch-xla", "triton"),
    *("botocore", "click", "cryptography", "dask", "diskcache", "distributed", "filelock", "jinja2"),
    *("msgspec", "numpy", "psutil", "rfc8785", "rich", "transformers", "urllib3", "wrapt", "xxhash"),
)

SHOWN_PREFIXES = (*PREFIXES, "NEFFCACHE_", "TORCHINDUCTOR_", "TORCHDYNAMO_")
SHOWN = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CXX", "CC", "TMPDIR"),
        *("XDG_CACHE_HOME", "LANG", "LC_ALL", "OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_LOGS"),
        *("TORCH_DEVICE_BACKEND_AUTOLOAD", "KUBERNETES_SERVICE_HOST", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_EC2_METADATA_DISABLED"),
        *("AWS_CA_BUNDLE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy"),
        *("COLLECTIVE_BUCKETSIZE_IN_MB", "COLLECTIVE_MIN_BUCKETS", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"),
    }
)
"""Variables whose values are shown, redacted."""

NAMED = frozenset(
    {
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ROLE_ARN"),
        *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"),
        *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "HF_TOKEN", "HF_HOME"),
    }
)
"""Variables of which is only said that they are set. No other variable is mentioned."""

README = """\
What `neffcache doctor --bundle` collected for a support thread. Look through it before you send it.

Removed are: values of variables and fields that sound secret, credentials of the AWS, Hugging Face and netrc files,
key blocks, tokens, authorization headers, users, passwords and queries of URLs, AWS account numbers, mail addresses,
what looks drawn by chance, and the names of the user, the home directory and this host.
In are: names of buckets, prefixes, configurations, paths outside of the home directory, and digests.

doctor.json       everything that `neffcache doctor --json` says, the remote's rights among it
versions.json     of neffcache, Python, the system and the packages that matter
environment.json  variables that matter; of credentials only that they are set
settings.json     the settings in force, and where each one came from
config/           neffcache.toml of the working directory
store.json        what the store holds: manifests, refs, quarantine, leftovers
remote.json       who asks, and what they may do below the prefix
failures.json     what the compiler refused, as it is remembered
failures/         the newest logs of that, beginning and end
runs/             the newest reports of ranks of launches that `neffcache env` prepared
included/         files that were named with --include, beginning and end
"""


def write_bundle(
    target: Path, report: Report, environ: Mapping[str, str], *, include: Sequence[Path] = ()
) -> dict[str, Any]:
    """Write the archive; its document. Raises Usage for a file that cannot be read or written, Bug for a secret."""
    if target.exists():
        raise Usage(f"{target} exists", hint="name a file that does not, or remove it")
    redactor = Redactor.of_host(environ)
    members = {
        name: redactor.text(content) if isinstance(content, str) else _dump(redactor.json(content))
        for name, content in _members(report, environ, include)
    }
    for name, text in members.items():
        if redactor.leaks(text):  # the names are all ours
            raise Bug(f"{name} of the bundle still holds a secret of this host", hint="nothing was written; tell us")
    data = archive({name: text.encode(errors="replace") for name, text in members.items()})
    try:
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except OSError as fault:
        if not isinstance(fault, FileExistsError):
            remove(target)  # half of it
        raise Usage(f"{target} cannot be written: {fault.strerror}", hint="name another file") from None
    return {"file": str(target), "bytes": len(data), "members": sorted(members)}


def archive(members: Mapping[str, bytes]) -> bytes:
    """A tar.gz in the order of names, without times, owners and the archive's own name: equal content, equal bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(members):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(members[name]), 0o644
            tar.addfile(entry, io.BytesIO(members[name]))
    return gzip.compress(raw.getvalue(), mtime=0)


def _members(report: Report, environ: Mapping[str, str], include: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    yield "README.txt", README
    document = report.to_json()
    yield "doctor.json", document
    yield "versions.json", versions()
    yield "environment.json", shown_environment(environ)
    yield "settings.json", document["settings"]
    yield "remote.json", report.remote
    yield "config/neffcache.toml", _file(Path(FILE)) or ""
    yield from _of_store(report)
    for number, path in enumerate(include, start=1):
        text = _file(path)
        if text is None:
            raise Usage(f"{path} cannot be read", hint="--include takes text files such as a job's log")
        yield f"included/{number:02}.txt", text


def versions() -> dict[str, Any]:
    """Of what is installed and what it runs on; no names of hosts."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "neffcache": __version__,
        "python": sys.version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "packages": packages,
    }


def shown_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the lists above by name; one that sounds secret is only said to be set."""
    found = {}
    for name in sorted(environ):
        if name in NAMED:
            found[name] = SET
        elif name in SHOWN or name.startswith(SHOWN_PREFIXES):
            found[name] = REMOVED if is_secret_name(name) else environ[name]
    return found


def _of_store(report: Report) -> Iterator[tuple[str, Any]]:
    summary: dict[str, Any] = {**report.store}
    failures: dict[str, Any] = {}
    with contextlib.suppress(NeffcacheError):
        store = LocalStore.open(str(summary["path"]), writable=False, given=summary["origin"] != "default")
        with contextlib.suppress(StoreFault):
            summary["listed"] = {"manifests": manifest_rows(store)[:ROWS], "refs": ref_rows(store)[:ROWS]}
        found = sorted(Index.look(store).failures.items(), key=lambda item: -item[1].at)
        failures = {
            key: {"toolchain": failure.toolchain, "code": failure.code, "message": failure.message, "at": failure.at}
            for key, failure in found[:ROWS]
        }
        for number, (_, failure) in enumerate(found[:LOGS], start=1):
            with contextlib.suppress(NeffcacheError):
                yield f"failures/{number:02}.log", _text(store.read_blob(failure.log))
        yield from _runs(store.root / RUNS)
    yield "store.json", summary
    yield "failures.json", failures


def _runs(folder: Path) -> Iterator[tuple[str, str]]:
    """Reports and logs of the newest launches; their directories are numbered, because a name may tell of somebody."""
    try:
        newest = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return
    for number, directory in enumerate(newest[:RUN_DIRECTORIES], start=1):
        reports = sorted((directory / "reports").glob("rank-*.json"), key=lambda path: (len(path.name), path.name))
        for place, path in enumerate(reports[:RANKS]):
            if (text := _file(path)) is not None:
                yield f"runs/{number:02}/report-{place:02}.json", text
        for place, path in enumerate(sorted(directory.glob("**/*.log"))[:RANKS]):
            if (text := _file(path)) is not None:
                yield f"runs/{number:02}/log-{place:02}.txt", text


def _file(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= 4 * TEXT_BYTES:
                return _text(file.read())
            head = file.read(TEXT_BYTES)
            file.seek(-TEXT_BYTES, os.SEEK_END)
            return _text(head + b"\n" + file.read())
    except OSError:
        return None


def _text(data: bytes) -> str:
    """At most TEXT_BYTES, cut between lines, so that no secret is cut in two and overlooked."""
    text = data.decode(errors="replace")
    if len(text) <= TEXT_BYTES:
        return text
    head, tail = text[: TEXT_BYTES // 2], text[-TEXT_BYTES // 2 :]
    return f"{head.rpartition(chr(10))[0]}\n[... left out ...]\n{tail.partition(chr(10))[2]}"


def _dump(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"
