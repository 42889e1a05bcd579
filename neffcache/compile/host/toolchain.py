"""The host toolchain: Inductor on this CPU. A real compiler with real artifacts, and never a NEFF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neffcache.compile.host import identity as host
from neffcache.compile.toolchain import Identity


class HostToolchain:
    """Inductor for this CPU; the default where no Neuron compiler is installed.

    `native`: its own cache directory is what is kept, and no graph is compiled by us.
    """

    name = host.NAME
    harness = True
    first_line = "toolchain host: Inductor on this CPU; its artifacts are no NEFFs"
    capabilities = frozenset({"compile_graph", "native_store"})

    def __init__(self, *, native: bool = False) -> None:
        self.native = native

    def identity(self, environ: Mapping[str, str], world_size: int) -> Identity:
        return host.identity(environ, world_size, native=self.native)

    def environment(self, environ: Mapping[str, str], world_size: int) -> dict[str, str]:
        return host.environment(environ, world_size, native=self.native)

    def cleared(self) -> tuple[str, ...]:
        return ()

    def settings(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return {}
