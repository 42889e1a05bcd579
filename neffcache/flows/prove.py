"""Prove a verdict: warm a configuration that fits on this machine's CPUs, then train it and count hits and compiles."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from neffcache.errors import NeffcacheError
from neffcache.flows.request import make_request
from neffcache.flows.run import run
from neffcache.flows.verdicts import Verdict
from neffcache.flows.warm import warm
from neffcache.store.local import LocalStore


def prove(verdict: Verdict, environ: Mapping[str, str], place: Path, *, steps: int = 2) -> Verdict:
    """`compiles` when all graphs compile, `trains` when a real run then hits every graph and compiles none.

    Else the verdict as it is, with what went wrong as its reason.
    """
    store = LocalStore.open(place / f"store-{verdict.config}", writable=True, given=True)
    request = make_request(verdict.run or verdict.config, environ=environ)
    state, why = verdict.verdict, ""
    try:
        result = warm(request, store, environ)
        if not result.complete:
            why = result.failures[0].message if result.failures else "not complete"
        else:
            state = "compiles"
            document = run(request, store, environ, steps=steps, output=lambda: sys.stderr)
            if document["exit_code"] == 0:
                state = "trains"
            else:
                why = str((document.get("error") or {}).get("message", "the run failed"))
    except NeffcacheError as fault:
        why = fault.message
    return msgspec.structs.replace(verdict, verdict=state, reason=why[:400] or verdict.reason)
