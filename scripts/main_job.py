"""Warm, push, init elsewhere, run, prove: what `scripts/quickstart` does once the environment stands.

Everything happens in a temporary directory with a HOME of its own, through the command line that users have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from seaweedfs import Identity, serve

from neffcache.flows.request import words

CONFIG = "llama3_debugmodel"
STEPS = 3
SEED = ("--set", "debug.seed=7")
EAGER = ("--set", "compile.enable=false")
BUCKET = "fleet"
REMOTE = f"s3://{BUCKET}/neffcache"
BUILDER = Identity("builder")
READER = Identity("reader", (f"Read:{BUCKET}/neffcache/*",))


def neffcache(environ: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run a command with --json, its words passing through on stderr; ends this program when it fails."""
    print(f"\n$ neffcache {' '.join(arguments)}", file=sys.stderr, flush=True)
    command = [str(Path(sys.executable).with_name("neffcache")), *arguments, "--json"]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if done.returncode != 0:
        raise SystemExit(f"quickstart: this command ended with {done.returncode}: {document.get('message', '')}")
    return document


def check(holds: bool, what: str) -> None:
    print(f"{'ok  ' if holds else 'FAIL'} {what}", file=sys.stderr, flush=True)
    if not holds:
        raise SystemExit(f"quickstart: not so: {what}")


def other_machine(environ: dict[str, str], place: str) -> dict[str, str]:
    """The environment of another machine: another HOME, an empty store, no key to S3."""
    home = Path(place, "other-home")
    home.mkdir()
    return {**environ, "HOME": str(home), "NEFFCACHE_DIR": str(Path(place, "volume"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with the document of the warm run on stdout")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="neffcache-quickstart-") as place:
        foreign = ("NEFFCACHE_", "NEURON_", "AWS_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        home = Path(place, "home")
        home.mkdir()
        environ = {**kept, "HOME": str(home), "NEFFCACHE_DIR": str(Path(place, "store")), "TMPDIR": place}
        environ.pop("OMP_NUM_THREADS", None)

        warmed = neffcache(environ, "warm", CONFIG)
        graphs = warmed["graphs"]
        check(warmed["complete"], f"warm: manifest complete, {graphs['compiled']} of {graphs['total']} graphs compiled")
        again = neffcache(environ, "warm", CONFIG)
        check(again["graphs"]["compiled"] == 0, "warm again: compiles nothing")
        state = neffcache(environ, "check", CONFIG)
        check([entry["state"] for entry in state] == ["HIT"], "check: HIT")  # type: ignore[index]

        neffcache(environ, "warm", CONFIG, *EAGER)
        eager = neffcache(environ, "run", CONFIG, "--steps", str(STEPS), *SEED, *EAGER)

        with serve(Path(place, "s3"), [BUILDER, READER], buckets=[BUCKET]) as server:
            pushed = neffcache({**environ, **server.environment(BUILDER)}, "push", CONFIG, "--remote", REMOTE)
            objects = pushed["objects"]
            check(
                objects["failed"] == 0 and objects["planned"] == objects["transferred"] + objects["present"],
                f"push: {objects['transferred']} things sent, none failed",
            )
            shutil.rmtree(environ["NEFFCACHE_DIR"])
            check(not Path(environ["NEFFCACHE_DIR"]).exists(), "the store that was warmed is gone")
            environ = other_machine(environ, place)
            filled = neffcache(
                {**environ, **server.environment(READER)}, "init", *words(warmed["request"]), "--remote", REMOTE
            )
            check(
                filled["state"] == "HIT" and filled["manifest"] == warmed["manifest"],
                f"init, with another HOME and a key that may only read: {filled['bytes']} bytes in "
                f"{filled['requests']} requests, view ready",
            )
        run = neffcache(environ, "run", CONFIG, "--steps", str(STEPS), *SEED)
        check(run["manifest"] == filled["manifest"], "run: from what init fetched, the server is gone")
        check(run["identity"] == "proved", "run: every rank proved that it is the job that was warmed")
        for rank in run["ranks"]:
            check(
                rank["hits"] == rank["graphs"] == graphs["total"] and rank["compiles"] == rank["misses"] == 0,
                f"rank {rank['rank']}: {rank['hits']} hits of {rank['graphs']} graphs, {rank['compiles']} compiles",
            )
        check(len(run["ranks"]) == 4, "4 ranks reported")

        pairs = list(zip(run["losses"], eager["losses"], strict=True))
        check(len(pairs) == STEPS, f"{STEPS} losses each")
        check(
            all(abs(warm - plain) < 5e-4 * abs(plain) for warm, plain in pairs),
            "losses equal those of an eager run: " + ", ".join(f"{warm:.4f}/{plain:.4f}" for warm, plain in pairs),
        )
        print(
            f"\nstep one: {run['step_one']['seconds']} s warm and compiled, nothing built; "
            f"{eager['step_one']['seconds']} s eager; a later step takes {run['steady_step_seconds']} s compiled",
            file=sys.stderr,
        )
        if wanted.json:
            print(json.dumps(run))


if __name__ == "__main__":
    main()
