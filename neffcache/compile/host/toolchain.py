"""The host toolchain: Inductor on this CPU. A real compiler with real artifacts, and never a NEFF."""

from __future__ import annotations

from collections.abc import Mapping

from neffcache.compile.host import identity as host
from neffcache.compile.toolchain import Identity


class HostToolchain:
    """Inductor for this CPU; the default where no Neuron compiler is installed."""

    name = host.NAME
    capabilities = frozenset({"compile_graph"})

    def identity(self, environ: Mapping[str, str], world_size: int) -> Identity:
        return host.identity(environ, world_size)

    def environment(self, environ: Mapping[str, str], world_size: int) -> dict[str, str]:
        return host.environment(environ, world_size)
