"""The files of a store that change: the current manifest of a job key, the refs of a channel, and signatures."""

from __future__ import annotations

import time

from neffcache.errors import Bug, StoreFault
from neffcache.store import layout
from neffcache.store.documents import Documents
from neffcache.store.files import names
from neffcache.store.records import Extra, KeyPointer, Ref, Signatures
from neffcache.store.root import Root, log


class Pointers:
    """Pointers and refs of one store, replaced whole under a kernel lock; reading takes none."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.keys = Documents(root, KeyPointer, lambda item: layout.pointer_name(item.cache_key))
        self.signatures = Documents(root, Signatures, lambda item: layout.signature_name(item.manifest, item.signer))

    def set(self, cache_key: str, manifest_id: str, extra: Extra | None = None) -> KeyPointer:
        """Point a job key at a manifest of this store. Raises StoreFault when the manifest is not here."""
        self._need_manifest(manifest_id)
        pointer = KeyPointer(cache_key, manifest_id, dict(extra or {}))
        with self.root.lock(f"key-{cache_key[:2]}"):
            self.keys.replace(pointer)
        return pointer

    def swap(self, cache_key: str, expected: str | None, manifest_id: str) -> bool:
        """The same only when the current manifest is `expected` (None: none yet); whether it was."""
        self._need_manifest(manifest_id)
        with self.root.lock(f"key-{cache_key[:2]}"):
            current = self.keys.read(layout.pointer_name(cache_key))
            if (current.manifest if current else None) != expected:
                return False
            self.keys.replace(KeyPointer(cache_key, manifest_id))
            return True

    def put_ref(self, channel: str, config: str, request_digest: str, ref: Ref) -> Ref:
        """Write a ref over one of the same request that is not newer; the one that counts now.

        Raises Bug for a ref of another config, StoreFault.
        """
        if ref.config != config:
            raise Bug(f"a ref of {ref.config!r} was to be stored under {config!r}")
        self._need_manifest(ref.manifest)
        documents = self.documents(channel, request_digest)
        with self.root.lock(f"ref-{request_digest[:2]}"):
            current = documents.read_or_heal(layout.ref_name(channel, config, request_digest))
            if current is not None and current.serial > ref.serial:
                return current
            documents.replace(ref)
        return ref

    def put_signatures(self, made: Signatures) -> Signatures:
        """Add the statements of a signer to those that are here; all of them. Raises StoreFault."""
        self._need_manifest(made.manifest)
        name = layout.signature_name(made.manifest, made.signer)
        with self.root.lock(f"signature-{made.manifest[:2]}"):
            current = self.signatures.read_or_heal(name)
            united = made if current is None else current.united(made)
            if united is not current:
                self.signatures.replace(united)
            return united

    def refs(self, channel: str) -> list[tuple[str, Ref]]:
        """(request digest, ref) of every good ref of a channel; others are logged. Raises StoreFault."""
        folder = layout.channel_name(channel)
        found: list[tuple[str, Ref]] = []
        for name in names(self.root.path / folder):
            if (split := layout.split_ref(name)) is None:
                continue  # an orphan
            try:
                ref = self.documents(channel, split[1]).read(f"{folder}/{name}")
            except StoreFault as error:
                if "errno" in error.details:  # the file system, not this ref
                    raise
                log.warning("%s/%s is left out: %s", folder, name, error.message)
                continue
            if ref is not None:
                found.append((split[1], ref))
        return found

    def channels(self) -> list[str]:
        """The names of all channels. Raises StoreFault."""
        top = self.root.path / layout.REFS
        return [name for name in names(top) if layout.is_channel(name) and (top / name).is_dir()]

    def documents(self, channel: str, request_digest: str) -> Documents[Ref]:
        """The refs of one request in one channel."""
        return Documents(self.root, Ref, lambda item: layout.ref_name(channel, item.config, request_digest))

    def _need_manifest(self, manifest_id: str) -> None:
        name = layout.manifest_name(manifest_id)
        if not (self.root.path / name).exists():
            raise StoreFault(
                f"manifest {manifest_id} is not in {self.root.path}: nothing may point to it yet",
                hint="put the manifest first",
                details={"manifest": manifest_id},
            )


def next_serial(known: Ref | None, manifest_id: str) -> int:
    """The serial of a ref that names a manifest from now on: seconds since 1970, and always more than before.

    So machines that never meet still agree on which of their refs is newer, as far as their clocks do.
    """
    if known is not None and known.manifest == manifest_id and known.serial:
        return known.serial
    return max(int(time.time()), known.serial + 1 if known is not None else 1)
