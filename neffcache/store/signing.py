"""Ed25519 keys: made, read, and used to sign and verify bytes. The only module that touches `cryptography`.

A public key is written `ed25519:<base64 of its 32 bytes>`; PEM and OpenSSH files are read too. A private key is a PEM
file (PKCS 8, not encrypted) that only its owner can read.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neffcache.errors import Unsupported, Usage
from neffcache.key.canonical import sha256_hex

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = "ed25519:"
SIGNER_DIGITS = 32


@dataclass(frozen=True, slots=True)
class PublicKey:
    """32 bytes that verify. `signer` names them in a store."""

    raw: bytes

    @property
    def signer(self) -> str:
        return sha256_hex(self.raw)[:SIGNER_DIGITS]

    def __str__(self) -> str:
        return PREFIX + base64.b64encode(self.raw).decode()

    def verifies(self, signature: str, data: bytes) -> bool:
        """Whether `signature` (base64) was made over `data` by the private half. Raises Unsupported."""
        _need()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(base64.b64decode(signature, validate=True), data)
        except (InvalidSignature, ValueError):  # binascii.Error is a ValueError
            return False
        return True


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """What signs."""

    key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> str:
        """The signature of `data`, base64."""
        return base64.b64encode(self.key.sign(data)).decode()


def make_key(path: Path) -> PublicKey:
    """Make a key pair: `path` (mode 0600) and `path`.pub. Raises Usage when one of them exists, Unsupported."""
    _need()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    made = PrivateKey(key).public
    beside = path.with_name(f"{path.name}.pub")
    if beside.exists():
        raise Usage(f"{beside} exists", hint="choose another name; a key that is in use must not be replaced")
    _write_new(path, private, 0o600)
    _write_new(beside, f"{made}\n".encode(), 0o644)
    return made


def private_key(path: Path) -> PrivateKey:
    """The private key in a file. Raises Usage when there is none or others can read it, Unsupported."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    data = _read(path)
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise Usage(f"the private key {path} can be read by others", hint=f"chmod 600 {path}")
    load: Any = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
    try:
        key = load(data, password=None)
    except (ValueError, TypeError) as fault:
        raise Usage(
            f"{path} holds no private key that can be read: {str(fault).splitlines()[0][:200]}",
            hint="neffcache keygen makes one; it must not be encrypted",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise Usage(f"{path} holds a key of another kind", hint="an Ed25519 key is needed: neffcache keygen makes one")
    return PrivateKey(key)


def public_key(given: str) -> PublicKey:
    """The public key that `given` is (`ed25519:...`, `ssh-ed25519 ...`) or names as a file. Raises Usage."""
    if given.startswith(PREFIX):
        return PublicKey(_raw(given))
    data = given.encode() if given.startswith("ssh-ed25519 ") else _read(Path(given))
    text = data.decode(errors="replace").strip()
    return PublicKey(_raw(text)) if text.startswith(PREFIX) else _other(given, data)


def _other(given: str, data: bytes) -> PublicKey:
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    if b"PRIVATE KEY" in data:
        raise Usage(f"{given} is a private key; readers need the public one", hint=f"{given}.pub")
    try:
        key = load_ssh_public_key(data) if data.startswith(b"ssh-") else load_pem_public_key(data)
    except Exception as fault:  # the library raises several kinds, its own among them
        raise Usage(f"{given} is no public key: {str(fault).splitlines()[0][:200]}", hint="ed25519:...") from None
    if not isinstance(key, Ed25519PublicKey):
        raise Usage(f"{given} is a key of another kind", hint="an Ed25519 key is needed: neffcache keygen makes one")
    return PublicKey(key.public_bytes_raw())


def _raw(text: str) -> bytes:
    try:
        raw = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) != 32:
        raise Usage(f"{text[:60]!r} is no public key: after {PREFIX} come 32 bytes in base64", hint="see FILE.pub")
    return raw


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise Usage(
            f"the key {path} cannot be read: {os.strerror(fault.errno or 0)}", hint="neffcache keygen makes one"
        ) from None


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise Usage(f"{path} exists", hint="choose another name; a key that is in use must not be replaced") from None
    except OSError as fault:
        raise Usage(f"{path} cannot be written: {os.strerror(fault.errno or 0)}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _need() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise Unsupported(
            "signatures need the package cryptography, which is not installed", hint="pip install 'neffcache[sign]'"
        ) from None
