#!/usr/bin/env python3
"""push and pull against s5cmd, from a real S3 server (SeaweedFS) on this machine, alternating in one run.

The job has 1,000 files of 200 kB and 48 of 16 MB. s5cmd moves the same bytes as plain files and verifies nothing. Of a
push every byte is hashed: what goes in packs by us, and everything by the server, which is given the digests and is
shown by a probe to refuse others. Of a pull every byte is hashed by us, and after it once more by this script. Each
transfer is a process of its own, so start-up counts; `noop` is the pull itself, without the interpreter's start. Exit 1
when a bar does not hold.

    .venv/bin/python scripts/bench/transfer.py [--rounds 7] [--small 1000] [--large 48] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neffcache.key.canonical import xxh3_128_hex
from neffcache.store.local import LocalStore
from neffcache.store.records import Artifact, GraphRecord, RankClass, manifest
from scripts.seaweedfs import Identity, serve

BARS = {
    "pull_over_s5cmd": 0.9,
    "push_over_s5cmd": 1.2,
    "peak_rss_bytes": 300e6,
    "noop_seconds": 0.3,
    "noop_requests": 3,
}
BUCKET = "bench"

# What the command line does, with its memory: `ru_maxrss` of a child that has ended is that of the largest of all.
CLI = """
import resource, sys
from neffcache.cli.main import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
"""


def make(store: LocalStore, small: int, large: int) -> None:
    """A job of `large` graphs, each with a file of 16 MB and its share of the files of 200 kB."""
    dice = random.Random(5)
    graphs = max(large, 1)
    records: list[GraphRecord] = []
    for graph in range(graphs):
        artifacts: list[Artifact] = []
        with store.batch() as batch:
            text = batch.put(f"neffcache graph 1\n{graph}\n".encode())
            sizes = [200_000] * (small // graphs + (graph < small % graphs)) + [16_000_000] * (large > 0)
            for number, size in enumerate(sizes):
                data = dice.randbytes(size)
                artifacts.append(Artifact("neff", f"{graph}/{number}", batch.put(data), size, 0o444))
        components = {"text": text, "toolchain": "a" * 64}
        key = xxh3_128_hex(b"%d" % graph)
        records.append(GraphRecord(key, components, "forward", "g", 1, 1, text, tuple(artifacts), 1.0, None))
    store.put_graphs(records)
    made = store.put_manifest(
        manifest(
            cache_key=xxh3_128_hex(b"bench"),
            components={"lnc": {"sha256": "b" * 64, "value": {"lnc": 2}}},
            request={"config": "bench"},
            complete=True,
            phases=["first_step"],
            rank_classes=[RankClass("0", {"first_step": tuple(record.compile_key for record in records)})],
            artifacts=(),
            environment={},
            versions={},
            created="2026-01-01T00:00:00+00:00",
            host={},
        )
    )
    store.set_pointer(made.cache_key, made.id)


def timed(command: list[str], environ: dict[str, str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    os.sync()  # nobody pays for the dirty pages of somebody else
    start = time.perf_counter()
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return seconds, done


def verified(folder: Path) -> int:
    """Bytes of the files of a blob folder whose names are their SHA-256; ends the run at the first other one."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != path.name:
                raise SystemExit(f"{path.name} is not what was sent")
            total += len(data)
    return total


def measure(rounds: int, small: int, large: int, place: Path) -> dict[str, Any]:
    source = LocalStore.open(place / "source", writable=True, given=True)
    make(source, small, large)
    plain = place / "plain"
    plain.mkdir()
    for sha256 in source.blobs():
        os.link(source.blob_path(sha256), plain / sha256)
    size = verified(plain)
    me = Identity("bench")
    s5cmd = str(Path(sys.executable).parent / "s5cmd")
    taken: dict[str, list[float]] = {name: [] for name in ("push", "pull", "s5cmd_push", "s5cmd_pull")}
    peak = 0
    noop: list[tuple[float, int]] = []
    with serve(place / "weed", [me], buckets=[BUCKET]) as server:
        environ = {**os.environ, **server.environment(me), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)

        def ours(verb: str, number: int, store: Path, *words: str) -> tuple[float, dict[str, Any]]:
            nonlocal peak
            command = [sys.executable, "-c", CLI, verb, "--all", "--remote", f"s3://{BUCKET}/ours{number}", "--json"]
            seconds, done = timed([*command, "--dir", str(store), *words], environ)
            peak = max(peak, int(done.stderr.split()[-1]))
            return seconds, json.loads(done.stdout)

        def theirs(*words: str) -> float:
            return timed([s5cmd, "--endpoint-url", server.endpoint, "cp", *words], environ)[0]

        for number in range(rounds):
            pulled, copied = place / f"pulled{number}", place / f"copied{number}"
            turns = [
                ("push", lambda n: ours("push", n, source.root)[0]),
                ("s5cmd_push", lambda n: theirs(f"{plain}/", f"s3://{BUCKET}/theirs{n}/")),
                ("pull", lambda n: ours("pull", n, place / f"pulled{n}")[0]),
                ("s5cmd_pull", lambda n: theirs(f"s3://{BUCKET}/theirs{n}/*", f"{place}/copied{n}/")),
            ]
            for name, turn in turns if number % 2 == 0 else [turns[1], turns[0], turns[3], turns[2]]:
                taken[name].append(turn(number))
            for folder in (pulled / "blobs", copied):
                if verified(folder) != size:
                    raise SystemExit(f"{folder.name} does not hold all bytes")
            for _ in range(3):
                _, document = ours("pull", number, pulled)
                noop.append((document["seconds"], document["requests"]["total"]))
            for path in (*pulled.rglob("*"), *copied.rglob("*")):
                if path.is_file():
                    # Not removed: ext4 passes over each inode that was freed in the last minute, at every new file.
                    path.chmod(0o600)
                    os.truncate(path, 0)

    def over(verb: str) -> float:
        """The median of the rounds: the two of a round stand beside each other, whatever else the machine did then."""
        pairs = zip(taken[f"s5cmd_{verb}"], taken[verb], strict=True)
        return round(statistics.median(theirs / ours for theirs, ours in pairs), 3)

    return {
        "ratios": {"pull_over_s5cmd": over("pull"), "push_over_s5cmd": over("push")},
        "peak_rss_bytes": peak,
        "noop": {"seconds": round(statistics.median(s for s, _ in noop), 3), "requests": max(n for _, n in noop)},
        "bytes": size,
        "seconds": {name: [round(value, 3) for value in values] for name, values in taken.items()},
        "rounds": rounds,
        "verified": True,
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", type=int, default=1000, help="files of 200 kB")
    parser.add_argument("--large", type=int, default=48, help="files of 16 MB")
    parser.add_argument("--place", type=Path, help="where to work [the system's temporary place]")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        found = measure(arguments.rounds, arguments.small, arguments.large, Path(place))
    ratios = found["ratios"]
    found["bars"] = BARS
    found["holds"] = (
        all(ratios[name] >= BARS[name] for name in ratios)
        and found["peak_rss_bytes"] < BARS["peak_rss_bytes"]
        and found["noop"]["seconds"] < BARS["noop_seconds"]
        and found["noop"]["requests"] <= BARS["noop_requests"]
    )
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for verb in ("push", "pull"):
            pairs = zip(found["seconds"][f"s5cmd_{verb}"], found["seconds"][verb], strict=True)
            print(f"{verb}_over_s5cmd by round: {' '.join(f'{theirs / ours:.2f}' for theirs, ours in pairs)}")
        for name, values in found["seconds"].items():
            median = statistics.median(values)
            print(f"{name:11} {median:7.2f} s  {found['bytes'] / median / 1e6:7.0f} MB/s")
        print(f"pull_over_s5cmd {ratios['pull_over_s5cmd']}, push_over_s5cmd {ratios['push_over_s5cmd']}")
        print(f"peak memory {found['peak_rss_bytes'] / 1e6:.0f} MB; a pull with nothing to do {found['noop']}")
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
