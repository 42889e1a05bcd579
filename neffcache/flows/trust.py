"""Trust: who may say what a request means and what its graphs compiled to, shown by Ed25519 signatures.

A statement covers the manifest's id, its job key, the whole request, channel and serial of the ref, and for every
compile key what it compiled to: a manifest names graphs by compile key only, and whoever can write to a store could
put another graph record under one. With a required key a reader refuses what is unsigned, altered or older.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neffcache.errors import Mismatch, Miss, Usage
from neffcache.key.canonical import canonical_json, digest
from neffcache.store.local import LocalStore
from neffcache.store.records import GraphRecord, Manifest, Ref, Signatures
from neffcache.store.signing import PrivateKey, PublicKey, public_key

TYPE = "neffcache ref 1"
"""What a signature is about; in the signed bytes, so that it can never be taken for one about something else."""

Said = Callable[[str, str], Signatures | None]
"""Manifest id and signer -> what that signer says about it: `LocalStore.signatures`, or another source's."""

Graphs = Callable[[str], GraphRecord | None]
"""Compile key -> its record: `LocalStore.get_graph`, or another source's."""

Approve = Callable[[Manifest, Graphs], None]
"""Called with what is about to be fetched, before any of it has a name here; what it raises stops the fetch."""

SIGN_AGAIN = "sign it again where it was warmed: neffcache sign NAME --key FILE, then push"


@dataclass(frozen=True)
class Trust:
    """The keys of which one must have signed (none: nothing is asked), and the oldest serial that is taken."""

    keys: tuple[PublicKey, ...] = ()
    min_serial: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys)


NOBODY = Trust()
"""Asks for no signature: the store itself is trusted."""


def trust_of(given: Sequence[str], min_serial: int | None = None) -> Trust:
    """The trust that keys (`ed25519:...` or files) express. Raises Usage."""
    if min_serial and not given:
        raise Usage("a smallest serial without a required signature protects nothing", hint="--require-signature KEY")
    return Trust(tuple(public_key(item) for item in given), min_serial or 0)


def graph_digest(record: GraphRecord) -> str:
    """SHA-256 of what a graph compiled to: its text and its artifacts, whatever their order."""
    files = sorted([item.store, item.path, item.sha256, item.size, item.mode] for item in record.artifacts)
    return digest({"text": record.text, "artifacts": files})


def signed_bytes(manifest_id: str, statement: Mapping[str, Any]) -> bytes:
    """What a signature is made over: everything that a statement says but the signature itself."""
    said = {name: value for name, value in statement.items() if name != "signature"}
    return canonical_json({"type": TYPE, "manifest": manifest_id, "statement": said})


def sign(store: LocalStore, key: PrivateKey, channel: str, ref: Ref) -> Signatures:
    """Sign what a ref says and what its manifest's graphs compiled to, into the store.

    Raises Miss when the manifest or a graph is not there, or is not complete; Damaged, StoreFault.
    """
    manifest = store.get_manifest(ref.manifest)
    if manifest is None or not manifest.complete or manifest.cache_key != ref.cache_key:
        why = "is not here" if manifest is None else "is not complete" if not manifest.complete else "is another job's"
        raise Miss(f"manifest {ref.manifest[:12]} of {ref.config} {why}: it cannot be signed", hint="warm it first")
    statement = {
        "channel": channel,
        "request": dict(ref.request),
        "cache_key": ref.cache_key,
        "serial": ref.serial,
        "graphs": graph_digests(manifest, store.get_graph),
    }
    statement["signature"] = key.sign(signed_bytes(ref.manifest, statement))
    return store.put_signatures(Signatures(ref.manifest, key.public.signer, (statement,)))


def graph_digests(manifest: Manifest, graph: Graphs) -> dict[str, str]:
    """Compile key -> `graph_digest` of a manifest's graphs. Raises Miss when one has no record."""
    found = {}
    for key in manifest.compile_keys():
        record = graph(key)
        if record is None:
            raise Miss(f"graph {key} of manifest {manifest.id[:12]} has no record", hint="pull it or warm again")
        found[key] = graph_digest(record)
    return found


def statement_of(
    trust: Trust,
    channel: str,
    ref: Ref,
    signatures: Said,
    known: Ref | None = None,
) -> Mapping[str, Any] | None:
    """The statement that covers a ref, None when no signature is asked for.

    `known` is the ref that this reader took last. Raises Mismatch for a ref that is unsigned, altered or older.
    """
    if not trust:
        return None
    found = [item for item in _verified(trust, ref.manifest, signatures) if _covers(item, channel, ref)]
    if not found:
        raise _unsigned(trust, f"the ref of {ref.config} to manifest {ref.manifest[:12]}", ref.manifest)
    oldest = max(trust.min_serial, known.serial if known is not None else 0)
    if ref.serial < oldest:
        raise Mismatch(
            f"the ref of {ref.config} has serial {ref.serial}, and {oldest} was known already: "
            "somebody put an older state back",
            hint="warm, sign and push again; to go back on purpose, sign the older manifest under a new serial",
            details={"serial": ref.serial, "known": oldest, "manifest": ref.manifest},
        )
    return found[0]


def check_content(statement: Mapping[str, Any] | None, manifest: Manifest, graph: Graphs) -> None:
    """Raises Mismatch when a graph record is not what the statement says (None: nothing is asked), Miss for none."""
    if statement is None:
        return
    signed, here = statement["graphs"], graph_digests(manifest, graph)
    if altered := sorted(key for key in here.keys() | signed.keys() if here.get(key) != signed.get(key)):
        raise Mismatch(
            f"{len(altered)} of {len(here)} graphs of manifest {manifest.id[:12]} are not those that were signed; "
            f"the first is {altered[0]}",
            hint=f"pull into a store of its own (--dir); if it stays so, {SIGN_AGAIN}",
            details={"manifest": manifest.id, "graphs": altered},
        )


def check_manifest(trust: Trust, manifest: Manifest, signatures: Said, graph: Graphs) -> None:
    """For a reader that knows its job by key: some statement of a required signer must cover manifest and content.

    Raises Mismatch; Miss when a graph has no record.
    """
    if not trust:
        return
    fault: Mismatch | None = None
    for statement in _verified(trust, manifest.id, signatures):
        if statement.get("cache_key") != manifest.cache_key or _serial(statement) < trust.min_serial:
            continue
        try:
            return check_content(statement, manifest, graph)
        except Mismatch as error:
            fault = error
    raise fault or _unsigned(trust, f"manifest {manifest.id[:12]}", manifest.id)


class Signed:
    """What a remote's signers say, asked once for each manifest, and the checks of a pull that requires a signature."""

    def __init__(self, trust: Trust, signatures: Said) -> None:
        self.trust = trust
        self._ask = signatures
        self._said: dict[tuple[str, str], Signatures | None] = {}

    def said(self, manifest_id: str, signer: str) -> Signatures | None:
        name = manifest_id, signer
        if name not in self._said:
            self._said[name] = self._ask(manifest_id, signer)
        return self._said[name]

    def check_ref(self, channel: str, ref: Ref, known: Ref | None) -> None:
        """Raises Mismatch for a ref that is unsigned, altered or older than what is known."""
        statement_of(self.trust, channel, ref, self.said, known)

    def approve(self, manifest: Manifest, graph: Graphs) -> None:
        """Raises Mismatch for a manifest whose content nobody required signed."""
        check_manifest(self.trust, manifest, self.said, graph)

    def keep(self, store: LocalStore, manifests: Sequence[Manifest]) -> None:
        """Check what the store has now, and keep what was said about it. Raises Mismatch, StoreFault."""
        for manifest in manifests if self.trust else ():
            self.approve(manifest, store.get_graph)
        for found in self._said.values():
            if found is not None:
                store.put_signatures(found)


def _verified(trust: Trust, manifest_id: str, signatures: Said) -> list[Mapping[str, Any]]:
    """The statements about a manifest that a trusted key really made."""
    good = []
    for key in trust.keys:
        found = signatures(manifest_id, key.signer)
        for item in found.statements if found is not None else ():
            try:
                data = signed_bytes(manifest_id, item)
            except (TypeError, ValueError, RecursionError):
                continue
            if isinstance(item.get("graphs"), Mapping) and key.verifies(str(item.get("signature")), data):
                good.append(item)
    return good


def _covers(statement: Mapping[str, Any], channel: str, ref: Ref) -> bool:
    said = (statement.get("channel"), statement.get("cache_key"), statement.get("serial"))
    same = canonical_json(statement.get("request")) == canonical_json(dict(ref.request))
    return said == (channel, ref.cache_key, ref.serial) and same


def _serial(statement: Mapping[str, Any]) -> int:
    serial = statement.get("serial")
    return serial if isinstance(serial, int) else -1


def _unsigned(trust: Trust, what: str, manifest_id: str) -> Mismatch:
    return Mismatch(
        f"{what} is not signed, or not as it is, by a key that is required",
        hint=SIGN_AGAIN,
        details={"manifest": manifest_id, "signers": [key.signer for key in trust.keys]},
    )
