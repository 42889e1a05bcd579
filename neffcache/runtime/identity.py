"""Is this process the job that the manifest was made for? Component by component, field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffcache.compile.toolchain import Identity
from neffcache.key.canonical import digest
from neffcache.key.compare import Difference, differences
from neffcache.key.options import Options
from neffcache.key.target import LNC_VARIABLES, TARGET_VARIABLE, normal_target
from neffcache.key.workload import workload_component
from neffcache.store.records import Manifest


def place_differences(manifest: Manifest, environ: Mapping[str, str]) -> list[Difference]:
    """World size, LNC, target and compiler options, as far as this process's environment says them."""
    lnc, target = manifest.components["lnc"]["value"], manifest.components["target"]["value"]
    found = []
    world = int(environ.get("WORLD_SIZE", "1"))
    if world != lnc["world_size"]:
        found.append(Difference("lnc.world_size", lnc["world_size"], world))
    for name in LNC_VARIABLES:
        said = environ.get(name, "").strip()
        if said and said != str(lnc["lnc"]):
            found.append(Difference(f"lnc.lnc ({name})", lnc["lnc"], said))
    said = environ.get(TARGET_VARIABLE, "").strip()
    if said and normal_target(said, origin=TARGET_VARIABLE) != target["target"]:
        found.append(Difference(f"target.target ({TARGET_VARIABLE})", target["target"], said))
    if environ.get("NEURON_CC_FLAGS"):
        given = Options.parse([environ["NEURON_CC_FLAGS"]]).for_placement(target["target"], lnc["lnc"])
        found += differences(manifest.components["options"]["value"], given.component(), path="options")
    return found


def toolchain_differences(manifest: Manifest, identity: Identity) -> list[Difference]:
    """What this process's toolchain is and the manifest's is not."""
    recorded = manifest.components["toolchain"]
    if identity.id == recorded["sha256"]:
        return []
    return differences(recorded["value"], dict(identity.value), path="toolchain")


def workload_differences(manifest: Manifest, document: Mapping[str, Any]) -> list[Difference]:
    """What differs between the workload that was warmed and the document of what was really received."""
    recorded = manifest.components["workload"]
    workload = workload_component(document)
    if digest(workload) == recorded["sha256"]:
        return []
    return differences(recorded["value"], workload)
