"""Doctor: what is here, where each setting comes from, and what will go wrong. Writes nothing."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from neffcache.compile import pool
from neffcache.compile.neuron import installation, probes
from neffcache.compile.neuron.environment import unread
from neffcache.compile.neuron.identity import HINT, REASONS, identity
from neffcache.compile.toolchain import Identity
from neffcache.errors import NeffcacheError, RemoteFault, Usage
from neffcache.flows.costs import WORKER_BYTES
from neffcache.flows.remote import RemoteOptions, RemoteSettings
from neffcache.flows.settings import KNOWN, Setting, setting, store_root
from neffcache.key.target import INSTANCES, LNC_VARIABLES, default_lnc, normal_target
from neffcache.store.local import LocalStore

State = Literal["ok", "note", "warning", "error"]

LITTLE_SPACE = 10 * 10**9
"""Bytes: less than the NEFFs of one large job and a copy of them."""

VOLATILE = frozenset({"tmpfs", "ramfs"})
LAYERED = frozenset({"overlay", "aufs"})


@dataclass(frozen=True)
class Finding:
    """One line of the report. `code` is the exit code that a command would end with because of an error."""

    area: str
    state: State
    said: str
    hint: str = ""
    code: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "area": self.area,
            "state": self.state,
            "said": self.said,
            **({"hint": self.hint} if self.hint else {}),
        }


@dataclass(frozen=True)
class Report:
    """Everything that the doctor saw."""

    findings: tuple[Finding, ...]
    settings: tuple[Setting, ...]
    toolchain: dict[str, Any]
    hardware: dict[str, Any]
    probes: list[dict[str, str]]

    @property
    def exit_code(self) -> int:
        """That of the first error, 0 without one."""
        return next((finding.code for finding in self.findings if finding.state == "error"), 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "settings": [{"name": s.name, "value": s.value, "origin": s.origin} for s in self.settings],
            "toolchain": self.toolchain,
            "hardware": self.hardware,
            "probes": self.probes,
            "exit_code": self.exit_code,
        }


def doctor(
    directory: str | None,
    environ: Mapping[str, str],
    *,
    ask: bool = False,
    note: Callable[[str], None] = lambda _: None,
    root: Path = Path("/"),
) -> Report:
    """Look at everything. With `ask` the probes are asked again, which compiles a few operators."""
    findings: list[Finding] = []
    toolchain, found = _toolchain(environ, findings)
    hardware = _hardware(environ, findings, root)
    answers: list[dict[str, str]] = []
    if found is not None and installation.stack() == "native":
        answers = _probes(found, environ, findings, hardware, ask=ask, note=note, root=root)
    settings = tuple(_settings(directory, environ, findings))
    place = store_root(directory, environ)
    findings += _store(place, environ)
    findings += _remote(environ)
    findings += _machine()
    findings += [
        Finding("variables", "warning", text) for text in unread(environ, installation.stack(), ours=KNOWN.values())
    ]
    return Report(tuple(findings), settings, toolchain, hardware, answers)


def _toolchain(environ: Mapping[str, str], findings: list[Finding]) -> tuple[dict[str, Any], Identity | None]:
    stack = installation.stack()
    versions = installation.versions(environ)
    said: dict[str, Any] = {"neuron": stack, "versions": versions, "auto": "host", "id": None}
    if stack == "absent":
        findings.append(
            Finding("toolchain", "note", "neuron: not installed; auto is host, whose artifacts are no NEFFs")
        )
    elif stack in REASONS:
        findings.append(Finding("toolchain", "warning", REASONS[stack], HINT))
    else:
        said["auto"] = "neuron"
        try:
            found = identity(environ)
        except NeffcacheError as fault:
            findings.append(Finding("toolchain", "error", fault.message, fault.hint, fault.exit_code))
            return said, None
        said["id"] = found.id
        what = {"native": "TorchNeuron", "xla": "torch-neuronx on PyTorch/XLA"}[stack]
        parts = ", ".join(
            f"{name} {versions[name]}" for name in ("torch-neuronx", "neuronx-cc", "nki") if name in versions
        )
        findings.append(Finding("toolchain", "ok", f"neuron: {what} ({parts}), toolchain id {found.id[:12]}"))
        return said, found
    host = importlib.util.find_spec("torch") is not None
    gxx = shutil.which(environ.get("CXX", "g++"), path=environ.get("PATH", os.defpath))
    if host and gxx is None:
        findings.append(Finding("toolchain", "error", "host: no C++ compiler on PATH", "install g++, or set CXX", 8))
    else:
        findings.append(
            Finding("toolchain", "ok", f"host: {gxx}" if host else "host: torch is not installed (core install)")
        )
    return said, None


# --- device -------------------------------------------------------------------------------------------------------


def _hardware(environ: Mapping[str, str], findings: list[Finding], root: Path) -> dict[str, Any]:
    here = installation.hardware(environ, root)
    told = _neuron_ls(environ) if here.devices else {}
    said: dict[str, Any] = {**here.to_json(), **told}
    if not here.devices:
        findings.append(Finding("device", "note", "no Neuron device on this host"))
    else:
        versions = f"driver {here.driver or 'unknown'}, runtime {here.runtime or 'unknown'}"
        findings.append(
            Finding("device", "ok", f"{here.devices} Neuron devices ({told.get('instance', '?')}), {versions}")
        )
        if here.runtime is None:
            findings.append(
                Finding("device", "warning", "the Neuron runtime's version cannot be told: no libnrt.so found")
            )
    named = {name: environ[name].strip() for name in LNC_VARIABLES if environ.get(name, "").strip()}
    if told.get("lnc"):
        named["the driver (neuron-ls)"] = str(told["lnc"])
    if len(set(named.values())) > 1:
        values = ", ".join(f"{origin} = {value}" for origin, value in named.items())
        findings.append(Finding("LNC", "error", f"the LNC contradicts: {values}", "make them equal", Usage.exit_code))
    elif named:
        findings.append(Finding("LNC", "ok", f"LNC {next(iter(named.values()))} ({', '.join(named)})"))
    else:
        target = told.get("target", "trn2")
        findings.append(Finding("LNC", "note", f"LNC not said: {default_lnc(target)} on {target}"))
    return said


def _neuron_ls(environ: Mapping[str, str]) -> dict[str, Any]:
    """Instance, target and LNC as `neuron-ls` prints them above its table; {} when it does not answer."""
    path = shutil.which("neuron-ls", path=f"{environ.get('PATH', os.defpath)}:/opt/aws/neuron/bin")
    if path is None:
        return {}
    try:
        text = subprocess.run([path], capture_output=True, text=True, timeout=60, check=True, env=dict(environ)).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_neuron_ls(text)


def parse_neuron_ls(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (match := re.search(r"^instance-type:\s*(\S+)", text, re.MULTILINE)) is not None:
        found["instance"] = match[1]
        known = INSTANCES.get(match[1])
        try:
            found["target"] = known.target if known else normal_target(match[1].partition(".")[0])
        except Usage:
            found.pop("target", None)
    if (match := re.search(r"^logical-neuroncore-config:\s*([12])\b", text, re.MULTILINE)) is not None:
        found["lnc"] = int(match[1])
    return found


def _probes(
    found: Identity,
    environ: Mapping[str, str],
    findings: list[Finding],
    hardware: Mapping[str, Any],
    *,
    ask: bool,
    note: Callable[[str], None],
    root: Path,
) -> list[dict[str, str]]:
    target = str(hardware.get("target", "trn2"))
    if ask:
        lnc = int(hardware.get("lnc", default_lnc(target)))
        answers = probes.ask(found, environ, target=target, lnc=lnc, root=root, progress=note, again=True)
    else:
        noted = probes.known(found, environ, root=root)
        if noted is None:
            hint = "neffcache doctor --probe asks now (compiles a few operators); the first warm asks by itself"
            findings.append(Finding("probes", "note", "this installation was never asked", hint))
            return probes.UNASKED.to_json()
        answers = noted
    if not answers.is_("counters", "yes"):
        findings.append(Finding("probes", "error", "the counters do not count: no gate can be held", "", 8))
    if answers.is_("locations_in_key", "yes"):
        findings.append(Finding("probes", "warning", "source paths are in the keys: warm and run under the same path"))
    return answers.to_json()


# --- settings, stores, machine ------------------------------------------------------------------------------------


def _settings(directory: str | None, environ: Mapping[str, str], findings: list[Finding]) -> Iterator[Setting]:
    for name in KNOWN:
        try:
            yield store_root(directory, environ) if name == "dir" else setting(name, None, environ, "")
        except NeffcacheError as fault:
            findings.append(Finding("settings", "error", fault.message, fault.hint, fault.exit_code))
            return


def _store(place: Setting, environ: Mapping[str, str]) -> Iterator[Finding]:
    path = Path(os.path.abspath(place.value))
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    mount, kind = file_system(existing)
    where = f"{path} ({place.origin}), {kind or 'unknown file system'} on {mount}"
    advice = "give a directory on a disk or a mounted volume with NEFFCACHE_DIR"
    if kind in VOLATILE:
        yield Finding("store", "warning", f"{where}: it is memory, gone with the next reboot or pod", advice)
    elif kind in LAYERED and in_container(environ):
        yield Finding("store", "warning", f"{where}: it is the container's own layer, gone with the pod", advice)
    try:
        store = LocalStore.open(place.value, writable=False, given=place.given)
        manifests = store.manifests()
    except NeffcacheError as fault:
        yield Finding("store", "error", fault.message, fault.hint, fault.exit_code)
        return
    whole = sum(item.complete for item in manifests)
    writable = os.access(existing, os.W_OK)
    state: State = "ok" if writable or path.exists() else "error"
    yield Finding(
        "store",
        state,
        f"{where}: {len(manifests)} manifests, {whole} complete; {'can' if writable else 'cannot'} be written",
        "" if state == "ok" else advice,
        0 if state == "ok" else 7,
    )
    free = shutil.disk_usage(existing).free
    little = free < LITTLE_SPACE
    yield Finding("space", "warning" if little else "ok", f"{free / 1e9:.1f} GB free for the store")


def file_system(path: Path, mounts: list[tuple[str, str]] | None = None) -> tuple[str, str]:
    """(mount point, type) of the file system that holds `path`; ("?", "") when it cannot be told."""
    if mounts is None:
        mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    real = os.path.realpath(path)
    over = [(mount, kind) for mount, kind in mounts if os.path.commonpath([real, mount]) == mount]
    # Of several mounts on one point the last one is seen.
    return max(reversed(over), key=lambda found: len(found[0]), default=("?", ""))


def in_container(environ: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in environ or any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))


def _remote(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Who is asking S3, and what they may do below the prefix. Writes and removes one object where that is allowed."""
    settings = RemoteSettings.read(RemoteOptions(), environ)
    if settings.remote is None:
        yield Finding("remote", "note", "no remote is set")
        return
    from neffcache.remote.rights import RIGHTS, rights

    said = f"{settings.remote} ({settings.values['remote'].origin})"
    try:
        found = rights(settings.open())
    except NeffcacheError as fault:
        yield Finding("remote", "error", f"{said}: {fault.message}", fault.hint or "", fault.exit_code)
        return
    may = [name for name in RIGHTS if found[name]]
    lacks = [name for name in RIGHTS if not found[name]]
    yield Finding(
        "remote",
        "error" if "get" in lacks else "ok",
        f"{said} as {found['principal']}: may {', '.join(may) or 'nothing'}"
        + (f"; may not {', '.join(lacks)}" if lacks else ""),
        "without get nothing can be pulled" if "get" in lacks else "",
        RemoteFault.exit_code if "get" in lacks else 0,
    )
    if found["conditional_writes"] is False:
        yield Finding(
            "remote",
            "warning",
            "this store ignores If-None-Match: two pushes at once may lose a pointer",
            "use a store with conditional writes, or let one machine push",
        )


def _machine() -> Iterator[Finding]:
    limit = pool.memory_limit()
    jobs = pool.default_jobs(limit, WORKER_BYTES)
    yield Finding("memory", "ok", f"{limit / 1e9:.1f} GB for compiles: {jobs} workers at once")
    now = datetime.datetime.now(datetime.UTC)
    built = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    wrong = now < built
    yield Finding(
        "clock",
        "error" if wrong else "ok",
        f"{now.isoformat(timespec='seconds')}" + (": before this program was written" if wrong else ""),
        "S3 refuses requests that are 15 minutes off" if wrong else "",
        4 if wrong else 0,
    )
