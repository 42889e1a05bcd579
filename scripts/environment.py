"""Makes, adopts, checks and locks the environments of a checkout. Started by scripts/setup; standard library only.

An environment is reused when a look at what is installed says that it matches, never because it is there: its stamp
names the inputs (pyproject.toml, the lock, the version), the place, the Python and every package that setup left in it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("pyproject.toml", "hatch_build.py", "scripts/lock.txt", "neffcache/__init__.py")
LOCK = ROOT / "scripts" / "lock.txt"
STAMP = "neffcache-setup.json"

# These follow the build of torch (CUDA or CPU), so that a lock would tie the project to one build.
UNLOCKED = re.compile(r"^(neffcache|nvidia-.*|cuda-.*|triton)$")

# Runs inside the environment: what is installed there, and what of it neffcache with these extras needs.
PROBE = r"""
import importlib.metadata as metadata, json, platform, re, sys
def plain(name): return re.sub(r"[-_.]+", "-", name).lower()
found = {plain(d.metadata["Name"]): d for d in metadata.distributions()}
needed, missing, todo, seen = {}, [], [("neffcache", frozenset(sys.argv[1:]))], set()
try:
    from packaging.requirements import Requirement
except ImportError:
    Requirement = None
while todo and Requirement:
    name, extras = todo.pop()
    if (name, extras) in seen: continue
    seen.add((name, extras))
    if name not in found:
        missing.append(name)
        continue
    needed[name] = found[name].version
    for text in found[name].requires or ():
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in (extras or {""})):
            todo.append((plain(one.name), frozenset(one.extras)))
print(json.dumps({"python": platform.python_version(), "prefix": sys.prefix, "needed": needed, "missing": missing}))
"""


class Failed(Exception):
    """The environment could not be made; the text is for the user."""


@dataclass(frozen=True)
class Environment:
    path: Path
    extras: tuple[str, ...]

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.path / STAMP

    @property
    def name(self) -> str:
        return self.path.name


FULL = Environment(ROOT / ".venv", ("host", "test", "docs"))
CORE = Environment(ROOT / ".venv-core", ("test",))


def inputs_digest(root: Path = ROOT) -> str:
    """SHA-256 over the files that decide what belongs into an environment."""
    total = hashlib.sha256()
    for name in INPUTS:
        path = root / name
        data = path.read_bytes() if path.exists() else b""
        total.update(f"{name} {len(data)}\n".encode() + data)
    return total.hexdigest()


def read_lock(text: str) -> dict[str, str]:
    """name -> version of a lock; anything but `name==version` and comments is refused."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if not line:
            continue
        name, separator, version = line.partition("==")
        if not separator or "+" in version or not re.fullmatch(r"[a-z0-9-]+", name):
            raise Failed(f"scripts/lock.txt: {line!r} is not name==version without a build suffix")
        pins[name] = version
    return pins


def lock_text() -> str:
    """The lock, or nothing when it is still to be written."""
    return LOCK.read_text() if LOCK.exists() else ""


def write_lock(needed: Mapping[str, str]) -> str:
    """The lock's text for installed packages; the build suffix of a version (+cpu, +cu130) stays out."""
    pins = {name: version.split("+")[0] for name, version in needed.items() if not UNLOCKED.match(name)}
    head = (
        "# What scripts/setup installs: a constraints file for pip, written by `scripts/setup --lock`.\n"
        "# No build suffixes (+cpu, +cu130), and nothing that only one build of torch needs.\n"
    )
    return head + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def off_lock(needed: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """One sentence for each package whose installed version is not the locked one (a build suffix does not count)."""
    return [
        f"{name} is {needed[name]}, the lock says {pins[name]}"
        for name in sorted(needed.keys() & pins.keys())
        if needed[name].split("+")[0] != pins[name]
    ]


def probe(environment: Environment) -> dict[str, Any] | None:
    """What is installed, or None when there is no environment or its Python does not run."""
    if not environment.python.exists():
        return None
    command = [str(environment.python), "-I", "-c", PROBE, *environment.extras]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_stamp(environment: Environment) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads(environment.stamp.read_text())
    except (OSError, ValueError):
        return None
    return stamp


def differences(
    found: Mapping[str, Any], stamp: Mapping[str, Any] | None, *, inputs: str, path: Path, pins: Mapping[str, str]
) -> list[str]:
    """Why an environment must not be used as it is; empty when it matches."""
    if stamp is None:
        return ["no finished setup left its stamp in it"]
    reasons = []
    if stamp.get("inputs") != inputs:
        reasons.append("pyproject.toml, the lock or the version changed since it was made")
    if stamp.get("path") != str(path) or found["prefix"] != str(path):
        reasons.append("it was made in another place")
    if stamp.get("python") != found["python"]:
        reasons.append(f"it was made with Python {stamp.get('python')}, and its Python is {found['python']}")
    recorded: Mapping[str, str] = stamp.get("packages", {})
    needed: Mapping[str, str] = found["needed"]
    for name in sorted(recorded.keys() | needed.keys() | set(found["missing"])):
        before, now = recorded.get(name), needed.get(name)
        if before != now or now is None:
            reasons.append(f"{name} is {now or 'not installed'}, setup left {before or 'none'}")
    return reasons + off_lock(needed, pins)


def check(environment: Environment) -> list[str]:
    """Reasons not to use the environment as it is; empty when it matches."""
    found = probe(environment)
    if found is None:
        return ["there is none, or its Python does not run"]
    return differences(
        found, read_stamp(environment), inputs=inputs_digest(), path=environment.path, pins=read_lock(lock_text())
    )


def run(command: Iterable[str | Path], doing: str) -> None:
    # pip's progress belongs on stderr: stdout stays free for whoever calls setup from a script.
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    if done.returncode != 0:
        raise Failed(f"{doing} failed (exit {done.returncode}); its own message is above")


def make(environment: Environment, python: str, *, locked: bool, afresh: bool) -> dict[str, Any]:
    """Installs everything (into what is there unless `afresh`), leaves the stamp and returns the last probe."""
    if afresh:
        say(f"making {environment.name} with {python}")
        run([python, "-I", "-m", "venv", "--clear", environment.path], "making the environment")
    # From here to the new stamp the environment counts as unfinished, whatever happens.
    environment.stamp.unlink(missing_ok=True)
    pip: list[str | Path] = [environment.python, "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        pip.append("--quiet")  # errors still show
    if locked:
        pip += ["--constraint", LOCK]
    minutes = " (PyTorch among it: minutes)" if afresh and "host" in environment.extras else ""
    say(f"installing neffcache[{','.join(environment.extras)}] into {environment.name}{minutes}")
    run([*pip, "--quiet", "hatchling", "editables"], "installing the build tools")
    target = f"{ROOT}[{','.join(environment.extras)}]"
    # Without isolation the build tools are the locked ones; pip applies no constraints inside a build of its own.
    run([*pip, "--no-build-isolation", "--editable", target], "pip install")
    run([environment.python, "-m", "pip", "check", "--disable-pip-version-check"], "pip check")

    found = probe(environment)
    if found is None or found["missing"] or not found["needed"]:
        raise Failed(f"{environment.name} lacks {', '.join(found['missing']) if found else 'a Python that runs'}")
    if not locked:
        LOCK.write_text(write_lock(found["needed"]))
    wrong = off_lock(found["needed"], read_lock(lock_text()))
    if wrong:
        raise Failed(f"pip did not keep to the lock: {'; '.join(wrong)}")
    stamp = {
        "inputs": inputs_digest(),
        "path": str(environment.path),
        "python": found["python"],
        "packages": found["needed"],
    }
    environment.stamp.write_text(json.dumps(stamp, indent=1, sort_keys=True) + "\n")
    return found


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def usable_as_base(environment: Environment, python: str, *, explicit: bool) -> bool:
    """Whether installing into what is there is right; otherwise the environment is made again."""
    found = probe(environment)
    if found is None or found["prefix"] != str(environment.path):
        return False
    pip = subprocess.run([environment.python, "-I", "-m", "pip", "--version"], capture_output=True)
    if pip.returncode != 0 or f"{environment.path}/" not in pip.stdout.decode():
        return False
    if not explicit:
        return True
    asked = subprocess.run(
        [python, "-I", "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
    )
    return asked.stdout.strip() == str(found["python"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup")
    parser.add_argument("--python", required=True)
    parser.add_argument("--explicit", action="store_true", help="the user named the interpreter")
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--lock", action="store_true")
    arguments = parser.parse_args()
    environment = CORE if arguments.core else FULL
    if arguments.lock and arguments.core:
        parser.error("the lock is written from the full environment: --lock without --core")

    # Two setups in one checkout take turns; the second then finds that everything matches.
    with open(f"{environment.path}.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        reasons = check(environment)
        if arguments.check:
            for reason in reasons:
                say(f"{environment.name} does not match: {reason}")
            if not reasons:
                say(f"{environment.name} matches scripts/lock.txt")
            return 1 if reasons else 0
        fits = usable_as_base(environment, arguments.python, explicit=arguments.explicit)
        if not reasons and fits and not arguments.lock:
            say(f"{environment.name} matches scripts/lock.txt and is used as it is")
            return 0
        if environment.path.exists():
            for reason in reasons[:5]:
                say(f"{environment.name}: {reason}")
        found = make(environment, arguments.python, locked=not arguments.lock, afresh=not fits)
        say(f"{environment.name} is ready: Python {found['python']}, {len(found['needed'])} packages")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failure:
        say(str(failure))
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted; run it again, it goes on from what is installed")
        sys.exit(130)
