from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from neffcache.errors import Unsupported, Usage
from neffcache.store.local import LocalStore
from neffcache.store.records import Ref, Signatures
from neffcache.store.signing import make_key, private_key, public_key
from tests.store.conftest import Made

pytestmark = pytest.mark.fast


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    make_key(tmp_path / "fleet.key")
    return tmp_path / "fleet.key"


def test_a_key_signs_and_its_public_half_verifies_only_that(pair: Path) -> None:
    signature = private_key(pair).sign(b"one")
    public = public_key(str(pair.with_name("fleet.key.pub")))
    assert public.verifies(signature, b"one")
    assert not public.verifies(signature, b"two")
    assert not public.verifies(("B" if signature[0] == "A" else "A") + signature[1:], b"one")
    assert not public.verifies("not base64!", b"one")
    assert not make_key(pair.with_name("other")).verifies(signature, b"one")


def test_a_public_key_reads_the_same_from_text_file_pem_and_openssh(pair: Path, tmp_path: Path) -> None:
    public = private_key(pair).public
    key = private_key(pair).key.public_key()
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    ssh = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "pem").write_bytes(pem)
    (tmp_path / "ssh").write_bytes(ssh)
    for given in (str(public), f"{pair}.pub", str(tmp_path / "pem"), str(tmp_path / "ssh"), ssh.decode()):
        assert public_key(given) == public
    assert len(public.signer) == 32


def test_a_private_key_is_its_owner_s_alone_and_never_replaced(pair: Path) -> None:
    assert pair.stat().st_mode & 0o777 == 0o600
    before = pair.read_bytes()
    with pytest.raises(Usage, match="exists"):
        make_key(pair)
    pair.rename(pair.with_name("moved"))
    with pytest.raises(Usage, match=r"fleet\.key\.pub exists"):
        make_key(pair)
    assert not pair.exists()
    assert pair.with_name("moved").read_bytes() == before
    pair.with_name("moved").chmod(0o640)
    with pytest.raises(Usage, match="can be read by others"):
        private_key(pair.with_name("moved"))


@pytest.mark.parametrize("given", ["ed25519:", "ed25519:AAAA", "ed25519:!", "ssh-ed25519 AAAA", "/nowhere/key"])
def test_what_is_no_public_key_is_refused(given: str) -> None:
    with pytest.raises(Usage) as refused:
        public_key(given)
    assert refused.value.hint


def test_a_private_key_and_a_key_of_another_kind_are_refused_where_a_public_one_is_needed(
    pair: Path, tmp_path: Path
) -> None:
    with pytest.raises(Usage, match="private"):
        public_key(str(pair))
    other = generate_private_key(SECP256R1())
    (tmp_path / "ec").write_bytes(
        other.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(Usage, match="another kind"):
        public_key(str(tmp_path / "ec"))
    encoded = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "ec").chmod(0o600)
    (tmp_path / "ec").write_bytes(encoded)
    with pytest.raises(Usage, match="another kind"):
        private_key(tmp_path / "ec")


def test_without_the_library_nothing_is_taken_for_verified(monkeypatch: pytest.MonkeyPatch, pair: Path) -> None:
    public = private_key(pair).public
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(Unsupported, match="not installed") as refused:
        public.verifies("AAAA", b"")
    assert "neffcache[sign]" in refused.value.hint


def test_importing_it_imports_no_cryptography() -> None:
    code = "import sys, neffcache.store.signing, neffcache.flows.trust; print('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_statements_of_a_signer_are_united_and_a_store_keeps_them_by_manifest(store: LocalStore, made: Made) -> None:
    manifest = made.job(store, "a")
    signer = made.key("signer")
    first, second = {"serial": 1, "new": ["kept"]}, {"serial": 2}
    store.put_signatures(Signatures(manifest.id, signer, (first,)))
    store.put_signatures(Signatures(manifest.id, signer, (second, first)))
    found = store.signatures(manifest.id, signer)
    assert found is not None
    assert list(found.statements) == [first, second]
    [name] = store.names("signature")
    assert name == f"signatures/{manifest.id}/{signer}"
    assert store.get(name) is not None
    assert store.signatures(manifest.id, made.key("another")) is None


def test_a_ref_gives_way_to_a_newer_one_only(store: LocalStore, made: Made) -> None:
    old, new = made.job(store, "a"), made.job(store, "a", "b")
    newer = Ref({}, new.cache_key, new.id, "x", 5)
    assert store.put_ref("current", "x", "e" * 64, newer) == newer
    assert store.put_ref("current", "x", "e" * 64, Ref({}, old.cache_key, old.id, "x", 4)) == newer
    assert store.ref("current", "x", "e" * 64) == newer
    again = Ref({}, old.cache_key, old.id, "x", 5)
    assert store.put_ref("current", "x", "e" * 64, again) == again
