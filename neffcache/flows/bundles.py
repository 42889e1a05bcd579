"""Export and import: configurations as one file, for machines that share neither a network nor a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

from neffcache.errors import Miss
from neffcache.flows.listing import refs_of
from neffcache.flows.trust import NOBODY, Trust, check_content, check_manifest, statement_of
from neffcache.key.canonical import digest
from neffcache.store import bundle
from neffcache.store.bundle import Bundle, Named, Written
from neffcache.store.local import LocalStore
from neffcache.store.records import Damaged, Manifest, Signatures, is_collection


def export(store: LocalStore, names: Sequence[str], target: BinaryIO) -> Written:
    """Write what the names mean (configurations, beginnings of manifest ids or job keys; none: every ref) to a bundle.

    Raises Miss for a name without a ref and for a manifest that is not complete or lacks files; Damaged, StoreFault.
    """
    refs, manifests = named(store, names)
    return bundle.write(store, manifests, refs, target)


def named(store: LocalStore, names: Sequence[str]) -> tuple[list[Named], list[Manifest]]:
    """The refs that names mean, as of `export`, and their manifests, complete and with all files. Errors as there."""
    refs: dict[tuple[str, str, str], Named] = {}
    wanted: Sequence[str | None] = names or [None]
    for name in wanted:
        found = refs_of(store, name)
        if not found:
            raise Miss(
                f"{store.root} has no refs" if name is None else f"no ref of {store.root} is called {name!r}",
                hint="see neffcache ls --refs",
            )
        refs |= {(channel, ref.config, request): Named(channel, ref) for channel, request, ref in found}
    manifests = {item.ref.manifest: _complete(store, item) for item in refs.values()}
    return list(refs.values()), list(manifests.values())


def import_bundle(source: BinaryIO, store: LocalStore, trust: Trust = NOBODY) -> dict[str, Any]:
    """Read a bundle into a store; a ref that the store has newer stays.

    Nothing of it has a name in the store before all of it was read, checked and, with `trust`, found to be signed.
    Raises Usage, Damaged, StoreFault, Mismatch.
    """
    held = bundle.read(source, store)
    for manifest in held.manifests.values():
        if lacking := [key for key in manifest.compile_keys() if key not in held.graphs]:
            raise Damaged(f"the bundle lacks graph {lacking[0]} of manifest {manifest.id[:12]}")
    _check_signed(held, store, trust)
    for record in held.graphs.values():
        store.put_graph(record)
    for manifest in held.manifests.values():
        store.put_manifest(manifest)
        pointer = store.pointer(manifest.cache_key)
        current = None if pointer is None else store.get_manifest(pointer.manifest)
        if current is None or not current.complete or store.missing(current):
            store.set_pointer(manifest.cache_key, manifest.id)
    for signatures in held.signatures.values():
        store.put_signatures(signatures)
    newer = [
        item.ref.config
        for item in held.refs
        if store.put_ref(item.channel, item.ref.config, digest(dict(item.ref.request)), item.ref) != item.ref
    ]
    return {
        "manifests": sorted(held.manifests),
        "configs": sorted({item.ref.config for item in held.refs}),
        "graphs": len(held.graphs),
        "refs": len(held.refs),
        "kept_newer": newer,
        "signatures": len(held.signatures),
        "members": held.members,
        "bytes": held.bytes,
    }


def _check_signed(held: Bundle, store: LocalStore, trust: Trust) -> None:
    def said(manifest_id: str, signer: str) -> Signatures | None:
        return held.signatures.get((manifest_id, signer))

    for manifest in held.manifests.values():
        check_manifest(trust, manifest, said, held.graphs.get)
    for item in held.refs:
        known = store.ref(item.channel, item.ref.config, digest(dict(item.ref.request)))
        statement = statement_of(trust, item.channel, item.ref, said, known)
        check_content(statement, held.manifests[item.ref.manifest], held.graphs.get)


def _complete(store: LocalStore, item: Named) -> Manifest:
    found = store.get_manifest(item.ref.manifest)
    lacking = [] if found is None else store.missing(found)
    if found is None or not found.complete or lacking:
        why = "is not here" if found is None else f"lacks {len(lacking)} files" if lacking else "is not complete"
        raise Miss(
            f"manifest {item.ref.manifest[:12]} of {item.ref.config} {why}: it cannot be exported",
            hint="neffcache pull it" if is_collection(item.ref) else f"neffcache warm {item.ref.config}",
        )
    return found
