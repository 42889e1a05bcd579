"""Worker: what a TorchTitan configuration (or a callable) means, and what this machine's toolchain is.

Its answer says what it was made of, so that it can be remembered.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from neffcache.flows.provenance import Recorder
from neffcache.flows.workers import answer

PROGRAMS = {"g++": (), "clang++": (), "c++": (), "ldconfig": ("/etc/ld.so.cache",)}
"""Programs that torch and the identity of the toolchain start, and what else their answers go by."""

OWN = frozenset({"torchtitan", "spmd_types", "neffcache.trace.harness"})
"""Packages of which we know what they read when they are resolved; other people's code may ask anything."""


def resolve(given: dict[str, Any]) -> dict[str, Any]:
    """{"kind", "module", "function", "settings", "said", ...} -> what a `Job` holds.

    `settings` are TorchTitan's options with those that the toolchain needs, `said` only what the request has.
    """
    from neffcache.compile import toolchains

    # First of all: a program may change what the toolchain is made of, and its identity is that of a fresh process.
    world = given["world_size"]
    identity = toolchains.identity(given["toolchain"], os.environ, world, native=given["native"])

    toolchain = {"name": identity.name, "value": dict(identity.value), "versions": dict(identity.versions)}

    from neffcache.key.workload import CALLABLE, TORCHTITAN
    from neffcache.trace import inference, titan
    from neffcache.trace.document import inference_document, package_versions, workload_document

    if (given["kind"] or inference.kind_of(given["module"], given["function"])) == CALLABLE:
        workload = inference.find(given["module"], given["function"])
        values = workload.resolve(given["said"])
        document = inference_document(workload, values, os.environ)
        return {
            "kind": CALLABLE,
            "arguments": workload.words(values),
            "document": document,
            "mesh": {"tp": world},
            "replaced": [],
            "options": {name: str(value) for name, value in values.items()},
            "toolchain": toolchain,
            "packages": package_versions(document),
        }
    titan.version()
    if given["cpu"]:
        titan.use_cpu()
    titan.probe()
    config, arguments, replaced = titan.command_line(
        given["module"], given["function"], given["settings"], cpu=given["cpu"]
    )
    return {
        "kind": TORCHTITAN,
        "arguments": arguments,
        "document": workload_document(config, os.environ),
        "mesh": titan.mesh_degrees(config),
        "replaced": [
            {"what": entry.what, "by": entry.by, "changes_meaning": entry.changes_meaning} for entry in replaced
        ],
        "options": {path: str(value) for path, value in titan.option_values(config)},
        "toolchain": toolchain,
        "packages": {"torchtitan": titan.version()},
    }


def doubts(found: Mapping[str, Any]) -> Iterator[str]:
    """Why an answer must not be remembered, as far as it tells."""
    if found["toolchain"]["name"] != "host":
        yield "the identity of this toolchain looks at files that it need not open"
    for package in found["document"]["sources"]:
        if package not in OWN:
            yield f"{package} is not TorchTitan's own code, and may depend on what nobody sees"


def main() -> int:
    gc.disable()  # importing torch makes millions of objects, all of which live until this process ends
    compiler = os.path.basename(os.environ.get("CXX", "g++"))
    recorder = Recorder(programs={**PROGRAMS, compiler: ()}, ignore=frozenset(map(os.path.abspath, sys.argv[1:])))

    def work(given: dict[str, Any]) -> dict[str, Any]:
        found = resolve(given)
        return {**found, "seen": recorder.provenance(doubts(found)).to_json()}

    return answer(work)


if __name__ == "__main__":
    sys.exit(main())
