"""Doctor: what is here, where each setting comes from, and what will go wrong. Writes nothing here."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.compile import pool
from neffcache.compile.neuron import installation, probes
from neffcache.compile.neuron.environment import DIRECTORIES, OFF_SWITCHES, environment, lock_timeout, unread
from neffcache.compile.neuron.identity import HINT, REASONS, identity
from neffcache.compile.toolchain import Identity
from neffcache.errors import NeffcacheError, RemoteFault, Unsupported, Usage
from neffcache.flows.costs import WORKER_BYTES
from neffcache.flows.examine import examine
from neffcache.flows.findings import Finding, of_fault, tried
from neffcache.flows.remote import RemoteOptions, RemoteSettings
from neffcache.flows.settings import KNOWN, READ_BY_OPTIONS, Setting, setting, several, store_root
from neffcache.flows.warmers import known
from neffcache.key.options import Options
from neffcache.key.target import (
    INSTANCES,
    LNC_VARIABLES,
    TARGET_VARIABLE,
    default_lnc,
    normal_target,
    resolve_placement,
)

OLDEST = {"torch": "2.14", "torchtitan": "0.3"}
"""The oldest versions that the host toolchain and the tracer take, as in pyproject.toml."""

NUMBERS = {
    "NEFFCACHE_JOBS": 1,
    "NEFFCACHE_TIME_LIMIT": 1,
    "NEFFCACHE_MIN_SERIAL": 0,
    "NEFFCACHE_SHARDS": 1,
    "NEFFCACHE_LEASE_HEARTBEAT": 0,
}
"""Variable -> the least that it may be."""

PATIENCE = 10.0
"""Seconds that a remote has to answer, unless the settings say more: a doctor does not wait long."""


@dataclass(frozen=True)
class Report:
    """Everything that the doctor saw."""

    findings: tuple[Finding, ...]
    settings: tuple[Setting, ...]
    toolchain: dict[str, Any]
    hardware: dict[str, Any]
    probes: list[dict[str, str]]
    store: dict[str, Any]
    remote: dict[str, Any]

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
            "store": self.store,
            "remote": self.remote,
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
    _said(environ, findings)
    place = next((item for item in settings if item.name == "dir"), None)
    store: dict[str, Any] = {}
    if place is not None:
        more, store = examine(place, environ, None if found is None else found.id)
        findings += more
    remote = tried(findings, "remote", lambda: _remote(environ, findings)) if settings else None
    if found is not None:
        findings += tried(findings, "variables", lambda: list(_contract(environ, hardware, store))) or ()
    findings += _machine()
    findings += [
        Finding("variables", "warning", text, "unset it, or give it the name that is read")
        for text in unread(environ, installation.stack(), ours=(*KNOWN.values(), *READ_BY_OPTIONS))
    ]
    return Report(tuple(dict.fromkeys(findings)), settings, toolchain, hardware, answers, store, remote or {})


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
    if host:
        findings += _frameworks()
    gxx = shutil.which(environ.get("CXX", "g++"), path=environ.get("PATH", os.defpath))
    if host and gxx is None:
        findings.append(Finding("toolchain", "error", "host: no C++ compiler on PATH", "install g++, or set CXX", 8))
    else:
        findings.append(
            Finding("toolchain", "ok", f"host: {gxx}" if host else "host: torch is not installed (core install)")
        )
    return said, None


def _frameworks() -> Iterator[Finding]:
    for name, oldest in OLDEST.items():
        version = installed(name)
        if version is None:
            yield Finding("toolchain", "note", f"{name} is not installed: configurations are known by ref only")
        elif _order(version) < _order(oldest):
            said = f"{name} {version} is installed, and neffcache takes {oldest} or newer"
            yield Finding("toolchain", "error", said, "pip install -U 'neffcache[host]'", Unsupported.exit_code)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    flags = tried(findings, "variables", lambda: Options.parse([environ.get("NEURON_CC_FLAGS", "")])) or Options.parse(
        []
    )
    named = {name: environ[name].strip() for name in LNC_VARIABLES if environ.get(name, "").strip()}
    if flags.lnc is not None:
        named["NEURON_CC_FLAGS"] = str(flags.lnc)
    if told.get("lnc"):
        named["the driver (neuron-ls)"] = str(told["lnc"])
    if len(set(named.values())) > 1:
        values = ", ".join(f"{origin} = {value}" for origin, value in named.items())
        findings.append(Finding("LNC", "error", f"the LNC contradicts: {values}", "make them equal", Usage.exit_code))
        return said
    try:
        resolve_placement(environ=environ, option_lnc=flags.lnc, option_target=flags.target)
        _same_target(environ, told, flags)
    except Usage as fault:
        findings.append(of_fault("LNC" if "LNC" in fault.message else "target", fault))
        return said
    if named:
        findings.append(Finding("LNC", "ok", f"LNC {next(iter(named.values()))} ({', '.join(named)})"))
    else:
        target = told.get("target", "trn2")
        findings.append(Finding("LNC", "note", f"LNC not said: {default_lnc(target)} on {target}"))
    return said


def _flags(environ: Mapping[str, str]) -> Options:
    said = environ.get("NEURON_CC_FLAGS")
    return Options.parse([said] if said else [])


def _same_target(environ: Mapping[str, str], told: Mapping[str, Any], flags: Options) -> None:
    """Raises Usage when the host is another target than the one that is asked for."""
    asked = {TARGET_VARIABLE: environ.get(TARGET_VARIABLE, "").strip(), "NEURON_CC_FLAGS": flags.target or ""}
    for origin, value in asked.items():
        here = told.get("target")
        if value and here and normal_target(value, origin=origin).partition("-")[0] != here:
            raise Usage(
                f"the target contradicts: {origin} = {value}, the driver (neuron-ls) = {here}",
                hint=f"unset {origin} on hosts that train; to warm for another target give --target",
            )


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


def _said(environ: Mapping[str, str], findings: list[Finding]) -> None:
    """What else is set that commands would refuse."""
    from neffcache.flows.compiling import check_executor
    from neffcache.flows.run import check_environment
    from neffcache.flows.trust import trust_of

    tried(findings, "warmers", lambda: known(environ))
    tried(findings, "variables", lambda: check_environment(environ))
    cluster = tried(findings, "settings", lambda: check_executor(environ.get("NEFFCACHE_EXECUTOR") or "local"))
    if cluster is not None and importlib.util.find_spec("distributed") is None:
        said = f"NEFFCACHE_EXECUTOR is {environ['NEFFCACHE_EXECUTOR']}, and Dask is not installed"
        findings.append(Finding("settings", "error", said, "pip install 'neffcache[dask]'", Unsupported.exit_code))
    tried(findings, "settings", lambda: trust_of(several("require_signature", (), environ)))
    for name, least in NUMBERS.items():
        text = environ.get(name, "").strip()
        if text and not (re.fullmatch(r"\d+(\.\d+)?", text) and float(text) >= least):
            said = f"{name} is {text!r}, not a number of at least {least}"
            findings.append(Finding("settings", "error", said, f"unset {name}, or correct it", Usage.exit_code))


def _contract(environ: Mapping[str, str], hardware: Mapping[str, Any], store: Mapping[str, Any]) -> Iterator[Finding]:
    """What in the environment contradicts what a run would set. Raises Usage for what it would refuse."""
    stack = installation.stack()
    flags = _flags(environ)
    place = resolve_placement(environ=environ, option_lnc=flags.lnc, option_target=flags.target)
    lnc = int(hardware.get("lnc", place.lnc))
    environment(environ, options=flags.for_placement(place.target, lnc), target=place.target, lnc=lnc, stack=stack)
    if stack == "native":
        lock_timeout(environ)
    for name in DIRECTORIES.get(stack, ()):
        said = environ.get(name, "").strip()
        if said and not said.startswith(str(store.get("path", "\0"))):
            told = f"{name} is {said}: a run uses its view and refuses to train from another directory"
            yield Finding("variables", "error", told, f"unset {name}", Usage.exit_code)
    for name in OFF_SWITCHES:
        if name in environ:
            told = f"{name} is set, whatever its value, and may switch TorchNeuron's cache off"
            yield Finding("variables", "warning", told, f"unset {name}; neffcache run does, other launchers do not")


def _remote(environ: Mapping[str, str], findings: list[Finding]) -> dict[str, Any]:
    """Who is asking S3, and what they may do below the prefix. Writes and removes one object where that is allowed."""
    settings = RemoteSettings.read(RemoteOptions(), environ)
    if settings.remote is None:
        findings.append(Finding("remote", "note", "no remote is set"))
        return {}
    if not settings.values["remote_timeout"].given:
        settings = RemoteSettings.read(RemoteOptions(remote_timeout=PATIENCE), environ)
    from neffcache.remote.rights import RIGHTS, rights

    said = f"{settings.remote} ({settings.values['remote'].origin})"
    summary: dict[str, Any] = {"remote": settings.remote}
    try:
        remote = settings.open()
        found = rights(remote)
    except NeffcacheError as fault:
        findings.append(of_fault("remote", fault, f"{said}: "))
        return {**summary, "fault": fault.to_json()}
    may = [name for name in RIGHTS if found[name]]
    lacks = [name for name in RIGHTS if not found[name]]
    findings.append(
        Finding(
            "remote",
            "error" if "get" in lacks else "ok",
            f"{said} as {found['principal']}: may {', '.join(may) or 'nothing'}"
            + (f"; may not {', '.join(lacks)}" if lacks else ""),
            "without get nothing can be pulled: ask for s3:GetObject below the prefix" if "get" in lacks else "",
            RemoteFault.exit_code if "get" in lacks else 0,
        )
    )
    if found["conditional_writes"] is False:
        findings.append(
            Finding(
                "remote",
                "warning",
                "this store ignores If-None-Match: two pushes at once may lose a pointer",
                "use a store with conditional writes, or let one machine push",
            )
        )
    return {**summary, **found}


def _machine() -> Iterator[Finding]:
    limit = pool.memory_limit()
    jobs = pool.default_jobs(limit, WORKER_BYTES)
    said = f"{limit / 1e9:.1f} GB for compiles: {jobs} workers at once"
    if limit < WORKER_BYTES:
        more = f"{said}, and one is expected to take {WORKER_BYTES / 1e9:.1f} GB"
        yield Finding("memory", "warning", more, "raise the memory limit of the container or control group")
    else:
        yield Finding("memory", "ok", said)
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
