"""Whether a remote really has what a record or manifest names: by size, or by hashing all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from neffcache.remote import errors
from neffcache.remote.client import Head
from neffcache.remote.packs import Place
from neffcache.remote.tier import RemoteStore
from neffcache.remote.transfer import Progress, at_once
from neffcache.store import layout


class Presence:
    """What was looked at, remembered: each object is asked for once."""

    def __init__(self, remote: RemoteStore) -> None:
        self.remote = remote
        self.heads: dict[str, Head | None] = {}
        self.damaged: set[str] = set()
        """Names in the layout that have their digest nowhere."""
        self.bad_packs: set[str] = set()
        """SHA-256 of packs of which a member does not have its digest."""
        self._hashed: set[tuple[str, Place | None]] = set()

    def look(self, named: Mapping[str, Place] | Mapping[str, Place | None]) -> None:
        """Ask for the size of every object that holds one of these. Raises Fault."""
        objects = {layout.pack_name(place.pack) if place else name for name, place in named.items()}
        unknown = sorted(objects - self.heads.keys())
        self._ask(unknown)
        # What its pack does not give may lie under its own name.
        alone = [name for name, place in named.items() if place and not self._in_pack(place) and name not in self.heads]
        self._ask(alone)

    def _ask(self, names: Iterable[str]) -> None:
        at_once(self.remote.client.access.transfers, self.head, list(names))

    def head(self, name: str) -> Head | None:
        """Size and ETag of an object, asked for once. Raises Fault."""
        if name not in self.heads:
            self.heads[name] = self.remote.client.head(name)
        return self.heads[name]

    def there(self, name: str, place: Place | None, size: int | None) -> bool:
        """Whether it is there with its size (None: any), as far as `look` was called for it."""
        if name in self.damaged:
            return False
        if place is not None and self._in_pack(place):
            return size is None or place.size == size
        head = self.heads.get(name)
        return head is not None and (size is None or head.size == size)

    def _in_pack(self, place: Place) -> bool:
        head = self.heads.get(layout.pack_name(place.pack))
        return head is not None and head.size >= place.offset + place.size

    def hash(self, named: Mapping[str, Place | None], progress: Progress) -> None:
        """Read what is there, so that `there` says False and `damaged` names what has another digest. Raises Fault."""
        todo = [(name, place) for name, place in named.items() if self.there(name, place, None)]
        todo = [item for item in todo if item not in self._hashed]

        def check(item: tuple[str, Place | None]) -> None:
            name, place = item
            if place is not None and self._in_pack(place):
                if self._has_digest(name, layout.pack_name(place.pack), place.offset, place.size, progress):
                    self._hashed.add(item)
                    return
                self.bad_packs.add(place.pack)  # who reads looks under the member's own name next
            if self._has_digest(name, name, 0, None, progress):
                self._hashed.add(item)
            else:
                self.damaged.add(name)

        at_once(self.remote.client.access.transfers, check, todo)

    def _has_digest(self, name: str, where: str, start: int, length: int | None, progress: Progress) -> bool:
        for _ in range(2):  # bytes that changed on the way are right the second time
            sha = hashlib.sha256()
            try:
                for chunk in self.remote.client.chunks(where, start, length):
                    sha.update(chunk)
                    progress.moved(len(chunk))
            except errors.Incomplete:
                return False
            if sha.hexdigest() == name.rpartition("/")[2]:
                return True
        return False
