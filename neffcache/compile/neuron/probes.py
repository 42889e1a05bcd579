"""What an installed TorchNeuron does where documentation and source disagree or are silent: asked, never assumed.

Each probe is answered once per installation (toolchain id, runtime, driver, devices), in processes of their own, and
the answer is noted on this host. One that cannot be asked is `unknown` and treated as its worst outcome.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neffcache.compile.neuron import environment as contract
from neffcache.compile.neuron import installation, shim
from neffcache.compile.neuron.environment import Places
from neffcache.compile.neuron.notes import Notes
from neffcache.compile.toolchain import Identity
from neffcache.key.options import Options
from neffcache.variables import without_rank

UNKNOWN = "unknown"
TRIAL_SECONDS = 900
"""A trial compiles a handful of operators; beyond this it hangs."""


@dataclass(frozen=True)
class Probe:
    """A question. `outcomes` are its answers, worst first, each with what it changes."""

    name: str
    question: str
    outcomes: Mapping[str, str]

    @property
    def worst(self) -> str:
        return next(iter(self.outcomes))


PROBES: tuple[Probe, ...] = (
    Probe(
        "compile_only",
        "Does TORCH_NEURONX_COMPILE_ONLY=1 compile where there is no device?",
        {
            "no": "warm runs on the device, with the job's real ranks.",
            "with_device": "It compiled beside a device; without one it was not asked. warm runs on the device.",
            "yes": "warm compiles one rank of each class with a fake process group, on any host.",
        },
    ),
    Probe(
        "version_in_key",
        "Is the compiler's version in TorchNeuron's on-disk key?",
        {
            "no": "Two compilers would share a NEFF's name. Directories of two toolchain ids are never one.",
            "other_recipe": "The key is none that neffcache can compute. As for `no`.",
        },
    ),
    Probe(
        "locations_in_key",
        "Does the path of the source reach the on-disk key?",
        {
            "yes": "A checkout under another path misses: warm and run must use the same path.",
            "no": "The checkout may move.",
        },
    ),
    Probe(
        "compile_graph",
        "Does _C.compile_graph take StableHLO and give a NEFF?",
        {
            "no": "Single IR files cannot be compiled (`neffcache compile`).",
            "yes": "Single IR files can be compiled.",
        },
    ),
    Probe(
        "counters",
        "Does _get_compilation_cache_stats count compiles as documented?",
        {
            "no": "The gate cannot be held: `run` refuses the installation.",
            "yes": "The gate reads total_compilations in every rank.",
        },
    ),
    Probe(
        "shim_honoured",
        "Does TorchNeuron start the neuronx-cc that PATH finds first?",
        {
            "no": "A strict run watches the counters each second; one compile may begin before it ends.",
            "yes": "A strict run puts a refusing neuronx-cc first on PATH; no compile begins.",
        },
    ),
)
BY_NAME: Mapping[str, Probe] = {probe.name: probe for probe in PROBES}


@dataclass(frozen=True)
class Answers:
    """Outcome of each probe by name, and why it is what it is."""

    outcomes: Mapping[str, str]
    reasons: Mapping[str, str]

    def is_(self, name: str, outcome: str) -> bool:
        return self.outcomes.get(name, UNKNOWN) == outcome

    def to_json(self) -> list[dict[str, str]]:
        return [
            {
                "probe": probe.name,
                "question": probe.question,
                "outcome": self.outcomes.get(probe.name, UNKNOWN),
                "means": probe.outcomes.get(self.outcomes.get(probe.name, UNKNOWN), probe.outcomes[probe.worst]),
                "reason": self.reasons.get(probe.name, ""),
            }
            for probe in PROBES
        ]


UNASKED = Answers({}, {})


def known(identity: Identity, environ: Mapping[str, str], *, root: Path = Path("/")) -> Answers | None:
    """What was noted for this installation, None when it was never asked."""
    note = Notes.of_host(environ).get("probes", _installation(identity, environ, root))
    return None if note is None else Answers(note["outcomes"], note["reasons"])


def ask(
    identity: Identity,
    environ: Mapping[str, str],
    *,
    target: str,
    lnc: int,
    root: Path = Path("/"),
    progress: Callable[[str], None] = lambda _: None,
    again: bool = False,
) -> Answers:
    """The answers for this installation: noted ones, else by compiling a few operators.

    An answer that says nothing about the installation (no trial could start) is not noted.
    """
    found = None if again else known(identity, environ, root=root)
    if found is not None:
        return found
    progress("asking the installed TorchNeuron what it does (once per installation)")
    with tempfile.TemporaryDirectory(prefix="neffcache-probe-") as folder:
        answers = _asked(Path(folder), environ, target, lnc, installation.hardware(environ, root).devices)
    if any(outcome != UNKNOWN for outcome in answers.outcomes.values()):
        Notes.of_host(environ).put(
            "probes",
            _installation(identity, environ, root),
            {"outcomes": dict(answers.outcomes), "reasons": dict(answers.reasons)},
        )
    return answers


def _installation(identity: Identity, environ: Mapping[str, str], root: Path) -> dict[str, Any]:
    return {
        "schema": 1,
        "toolchain": identity.id,
        "python": sys.prefix,
        **installation.hardware(environ, root).to_json(),
    }


def _asked(place: Path, environ: Mapping[str, str], target: str, lnc: int, devices: int) -> Answers:
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}

    def say(name: str, outcome: str, reason: str = "") -> None:
        outcomes[name], reasons[name] = outcome, reason

    first = _trial(place / "one", environ, target, lnc)
    if first.get("error"):
        for probe in PROBES:
            say(probe.name, UNKNOWN, str(first["error"]))
        say("compile_only", "no", str(first["error"]))
        return Answers(outcomes, reasons)
    compiled = bool(first["neffs"])
    say("compile_only", ("with_device" if devices else "yes") if compiled else "no", f"{len(first['neffs'])} NEFFs")
    counted = first["counted"]
    say("counters", "yes" if compiled and counted and counted.get("total_compilations") else "no", str(counted))
    graph = first["graph"]
    say("compile_graph", "yes" if graph.get("neff_bytes") else "no", str(graph.get("error", "")))
    recipe = graph.get("recipe")
    if recipe is None:
        say("version_in_key", UNKNOWN, str(graph.get("error", "get_neff_info gave no on-disk key")))
    else:
        say("version_in_key", "no" if recipe else "other_recipe", "compared with XXH3-128 of in-memory key and IR")
    with ThreadPoolExecutor(2) as both:
        later = both.submit(_trial, place / "two" / "deeper", environ, target, lnc)
        strict = both.submit(_trial, place / "three", environ, target, lnc, refusing=True)
        second, refused = later.result(), strict.result()
    if second.get("error") or not compiled:
        say("locations_in_key", UNKNOWN, str(second.get("error", "nothing was compiled")))
    else:
        same = first["graph_neffs"] == second["graph_neffs"]
        say("locations_in_key", "no" if same else "yes", "the same program from two paths")
    asked = shim.refused(place / "three" / "private")
    if not compiled:
        say("shim_honoured", UNKNOWN, "nothing was compiled without it either")
    else:
        held = bool(asked) and not refused.get("neffs")
        say("shim_honoured", "yes" if held else "no", f"{len(asked)} compiles asked of it")
    return Answers(outcomes, reasons)


def _trial(place: Path, environ: Mapping[str, str], target: str, lnc: int, *, refusing: bool = False) -> dict[str, Any]:
    """Run the trial program from a copy below `place`, in an empty cache; its document, or {"error"}."""
    private = place / "private"
    private.mkdir(parents=True)
    program = place / "trial.py"
    shutil.copyfile(Path(__file__).with_name("trial.py"), program)
    bare = {
        name: value
        for name, value in without_rank(environ).items()
        if not name.startswith(("TORCH_NEURONX_", "NEURON_", "NKI_", "NEFFCACHE_"))
    }
    setting = contract.environment(
        bare,
        options=Options.parse([]),
        target=target,
        lnc=lnc,
        places=Places(place / "stores", private),
        compile_only=True,
    )
    given = setting.applied(bare)
    given |= {"TORCH_NEURONX_DEBUG_DIR": str(place / "debug"), "TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS": "1"}
    if refusing:
        real = installation.compiler_program(bare)
        given |= shim.install(private, bare, real or Path("/nonexistent"), private / "refused")
    answer = place / "answer.json"
    try:
        done = subprocess.run(
            [sys.executable, str(program), str(answer), str(place)],
            env={**given, "PYTHONPATH": os.pathsep.join([*_ours(), bare.get("PYTHONPATH", "")]).strip(os.pathsep)},
            cwd=place,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the trial did not end within {TRIAL_SECONDS} s"}
    try:
        found: dict[str, Any] = json.loads(answer.read_bytes())
        return found
    except (OSError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return {"error": last[:300], "neffs": []}


def _ours() -> list[str]:
    """Where this neffcache is imported from: the trial's own directory comes first on its path."""
    return [str(Path(__file__).resolve().parents[3])]
