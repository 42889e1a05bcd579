"""The names of things, the same in a local store and under `v1/` in S3."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from neffcache.errors import Usage

Kind = Literal["blob", "graph", "manifest", "key", "ref", "signature"]

# Directories of a local store. Views, index, quarantine, tmp and locks exist only here, never in S3.
BLOBS, GRAPHS, MANIFESTS, KEYS, REFS = "blobs/sha256", "graphs", "manifests", "keys", "refs"
PACKS, LEASES, FAILURES = "packs", "leases", "failures"  # only in a remote
COLLECTIONS = "collections"  # the channel of what is of no job
SIGNATURES = "signatures"  # a directory a manifest, made with its first signature
VIEWS, INDEX, QUARANTINE, TMP, LOCKS = "views", "index", "quarantine", "tmp", "locks"
DIRECTORIES = (TMP, BLOBS, GRAPHS, MANIFESTS, KEYS, REFS, VIEWS, QUARANTINE, LOCKS)  # tmp first: others are made in it

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{32}")
_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


class Name(NamedTuple):
    """What a name stands for: its kind, and the digest, key or ref in it."""

    kind: Kind
    id: str


def blob_name(sha256: str) -> str:
    """Raises Usage unless `sha256` is 64 hex digits."""
    return f"{BLOBS}/{_full(_SHA256, sha256, 'a SHA-256')[:2]}/{sha256}"


def pack_name(sha256: str) -> str:
    """Raises Usage unless `sha256` is 64 hex digits."""
    return f"{PACKS}/{_full(_SHA256, sha256, 'a SHA-256')[:2]}/{sha256}"


def graph_name(compile_key: str) -> str:
    """Raises Usage unless `compile_key` is 32 hex digits."""
    return f"{GRAPHS}/{_full(_KEY, compile_key, 'a compile key')}.json"


def lease_name(compile_key: str) -> str:
    """Raises Usage unless `compile_key` is 32 hex digits."""
    return f"{LEASES}/{_full(_KEY, compile_key, 'a compile key')}.json"


def failure_name(compile_key: str) -> str:
    """Raises Usage unless `compile_key` is 32 hex digits."""
    return f"{FAILURES}/{_full(_KEY, compile_key, 'a compile key')}.json"


def manifest_name(manifest_id: str) -> str:
    """Raises Usage unless `manifest_id` is 64 hex digits."""
    return f"{MANIFESTS}/{_full(_SHA256, manifest_id, 'a manifest id')}.json"


def pointer_name(cache_key: str) -> str:
    """Raises Usage unless `cache_key` is 32 hex digits."""
    return f"{KEYS}/{_full(_KEY, cache_key, 'a job key')}.json"


def signature_name(manifest_id: str, signer: str) -> str:
    """What one signer says about a manifest. Raises Usage unless these are 64 and 32 hex digits."""
    folder = f"{SIGNATURES}/{_full(_SHA256, manifest_id, 'a manifest id')}"
    return f"{folder}/{_full(_KEY, signer, 'a signer')}"


def channel_name(channel: str) -> str:
    """The directory of a channel. Raises Usage unless the channel is a short plain word."""
    return f"{REFS}/{_full(_CHANNEL, channel, 'the name of a channel')}"


def is_channel(name: str) -> bool:
    """Whether a directory's name can be a channel's."""
    return _CHANNEL.fullmatch(name) is not None


def ref_name(channel: str, config: str, request_digest: str) -> str:
    """The name of a ref; `config` is percent-encoded because `module:config` is one. Raises Usage for a bad part."""
    quoted = quote(config, safe="")
    if not config or len(quoted) > 150:
        raise Usage(f"the name of a configuration has 1 to 150 characters, not {config!r}")
    return f"{channel_name(channel)}/{quoted}-{_full(_DIGEST, request_digest, 'a request digest')}.json"


def split_ref(file_name: str) -> tuple[str, str] | None:
    """(config, request digest) of a file name in a channel's directory, or None for an orphan."""
    match = re.fullmatch(r"(.+)-([0-9a-f]{8,64})\.json", file_name)
    return (unquote(match[1]), match[2]) if match and quote(unquote(match[1]), safe="") == match[1] else None


def parse(name: str) -> Name | None:
    """What `name` stands for, or None when it is none of ours."""
    folder, _, last = name.rpartition("/")
    stem = last.removesuffix(".json")
    if _SHA256.fullmatch(last) and name == blob_name(last):
        return Name("blob", last)
    if last == stem:
        top, _, manifest_id = folder.partition("/")
        signed = top == SIGNATURES and _SHA256.fullmatch(manifest_id) and _KEY.fullmatch(last)
        return Name("signature", f"{manifest_id}/{last}") if signed else None
    if folder == MANIFESTS and _SHA256.fullmatch(stem):
        return Name("manifest", stem)
    if folder in (GRAPHS, KEYS) and _KEY.fullmatch(stem):
        return Name("graph" if folder == GRAPHS else "key", stem)
    channel = folder.removeprefix(f"{REFS}/")
    if channel != folder and _CHANNEL.fullmatch(channel) and split_ref(last):
        return Name("ref", f"{channel}/{stem}")
    return None


def _full(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise Usage(f"{text[:80]!r} is not {what}")
    return text
