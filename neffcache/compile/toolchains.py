"""The toolchains by name. Everything else asks an object of them for what it can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from neffcache.compile.toolchain import Identity, Toolchain
from neffcache.errors import Unsupported
from neffcache.key.options import Options

Name = Literal["host", "neuron"]


def choose(asked: str) -> Name:
    """`host` or `neuron` for `host|neuron|auto`; Unsupported (exit 8) when neuron was asked for and is not there."""
    from neffcache.compile.neuron import identity, installation

    if asked == "host":
        return "host"
    stack = installation.stack()
    if stack not in identity.REASONS:
        return "neuron"
    if asked == "neuron":
        raise Unsupported(identity.REASONS[stack], hint=identity.HINT)
    return "host"


def toolchain(
    name: str,
    *,
    native: bool = False,
    options: Options,
    target: str,
    lnc: int,
    ranks_per_node: int,
    settings: Mapping[str, Any],
) -> Toolchain:
    """The toolchain of one request."""
    if name == "neuron":
        from neffcache.compile.neuron.toolchain import NeuronToolchain

        return NeuronToolchain(options, target, lnc, ranks_per_node, settings)
    from neffcache.compile.host.toolchain import HostToolchain

    return HostToolchain(native=native)


def identity(name: str, environ: Mapping[str, str], world_size: int, *, native: bool = False) -> Identity:
    """What that toolchain is in this process, which must be fresh."""
    if name == "neuron":
        from neffcache.compile.neuron.identity import identity as neuron_identity

        return neuron_identity(environ)
    from neffcache.compile.host.toolchain import HostToolchain

    return HostToolchain(native=native).identity(environ, world_size)


def identity_in_rank(recorded: Mapping[str, Any], environ: Mapping[str, str]) -> Identity:
    """What the toolchain is in a training process; what only a compiler could say is taken from the record."""
    if recorded.get("name") == "neuron":
        from neffcache.compile.neuron.identity import identity as neuron_identity

        return neuron_identity(environ, asking=False)
    from neffcache.compile.host.identity import identity_in_rank as host_identity

    return host_identity(recorded)
