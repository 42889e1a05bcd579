"""Worker: what a TorchTitan configuration with these options means, and what this machine's toolchain is."""

from __future__ import annotations

import os
import sys
from typing import Any

from neffcache.flows.workers import answer


def resolve(given: dict[str, Any]) -> dict[str, Any]:
    """{"module", "function", "settings", "world_size", "cpu", "toolchain", "native"} -> what a `Job` holds."""
    from neffcache.compile import toolchains

    # First of all: a program may change what the toolchain is made of, and its identity is that of a fresh process.
    world = given["world_size"]
    identity = toolchains.identity(given["toolchain"], os.environ, world, native=given["native"])

    from neffcache.trace import titan
    from neffcache.trace.document import workload_document

    titan.version()
    if given["cpu"]:
        titan.use_cpu()
    titan.probe()
    module = given["module"] or titan.find_module(given["function"])
    chosen = ["--module", module, "--config", given["function"]]
    base = titan.load_config(chosen)
    settings = dict(given["settings"])
    replaced: list[titan.Replacement] = []
    if given["cpu"]:
        replaced = titan.host_replacements(base)
        own = titan.replacement_settings(base, replaced)
        settings = {**{name: value for name, value in own.items() if name not in settings}, **settings}
    arguments = [*chosen, *titan.setting_arguments(base, settings)]
    config = titan.load_config(arguments)
    return {
        "arguments": arguments,
        "document": workload_document(config, os.environ),
        "mesh": titan.mesh_degrees(config),
        "replaced": [
            {"what": entry.what, "by": entry.by, "changes_meaning": entry.changes_meaning} for entry in replaced
        ],
        "options": {path: str(value) for path, value in titan.option_values(config)},
        "toolchain": {"name": identity.name, "value": dict(identity.value), "versions": dict(identity.versions)},
        "torchtitan": titan.version(),
    }


if __name__ == "__main__":
    sys.exit(answer(resolve))
