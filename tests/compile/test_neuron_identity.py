"""What is installed, told without importing it, and what compiles, told by content."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from neffcache.compile.neuron import installation
from neffcache.compile.neuron.content import Program, Tree, content_digest
from neffcache.compile.neuron.identity import compiler, identity, program_version
from neffcache.compile.neuron.notes import Notes
from neffcache.errors import Unsupported
from tests.compile.neuron_stubs import BIN, SITE, environ, installed

FORGETFUL = Notes(None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stubs that a test may change."""
    copy = tmp_path / "site"
    shutil.copytree(SITE, copy)
    installed(monkeypatch, copy)
    return copy


@pytest.fixture
def user(tmp_path: Path) -> dict[str, str]:
    return environ(tmp_path / "user")


# --- which stack --------------------------------------------------------------------------------------------------


def test_native_torchneuron_is_told_by_its_own_c_part(site: Path) -> None:
    assert installation.stack() == "native"


@pytest.mark.parametrize(
    ("files", "stack"),
    [((), "placeholder"), (("xla_impl",), "xla"), (("xla.py", "parallel"), "xla"), (("_C.so",), "native")],
)
def test_the_stacks_are_told_apart_by_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], stack: str
) -> None:
    package = tmp_path / "torch_neuronx"
    package.mkdir()
    for name in ("__init__.py", *files):
        (package / name).write_text("raise RuntimeError('a detection must import nothing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installation.stack() == stack


def test_without_any_package_it_is_absent() -> None:
    assert installation.stack() == "absent"
    with pytest.raises(Unsupported, match="not installed") as told:
        identity({})
    assert told.value.exit_code == 8


def test_pypis_placeholder_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_neuronx").mkdir()
    (tmp_path / "torch_neuronx" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Unsupported, match="empty placeholder"):
        identity({})


def test_devices_driver_and_runtime_are_read_from_files(tmp_path: Path) -> None:
    for name in ("dev/neuron0", "dev/neuron1", "dev/neuron15", "dev/neuron_other", "sys/module/neuron/version"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("2.31.5.0\n")
    libraries = tmp_path / "opt/aws/neuron/lib"
    libraries.mkdir(parents=True)
    (libraries / "libnrt.so.2.31.24.0").touch()
    (libraries / "libnrt.so.2.30.9.0").touch()
    (libraries / "libnrt.so.1").symlink_to("libnrt.so.2.31.24.0")
    found = installation.hardware({}, tmp_path)
    assert found == installation.Hardware(devices=3, driver="2.31.5.0", runtime="2.31.24.0")


def test_a_host_without_a_device_has_none(tmp_path: Path) -> None:
    assert installation.hardware({}, tmp_path) == installation.Hardware(0, None, None)


# --- identity -----------------------------------------------------------------------------------------------------


def test_equal_packages_under_two_prefixes_are_one_toolchain(
    site: Path, tmp_path: Path, user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = identity(user)
    shutil.copytree(site, tmp_path / "elsewhere" / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere" / "site-packages"))
    other = tmp_path / "other-bin"
    other.mkdir()
    script = (BIN / "neuronx-cc").read_text()
    (other / "neuronx-cc").write_text(script.replace("/usr/bin/env python3", "/opt/some/where/bin/python3", 1))
    (other / "neuronx-cc").chmod(0o755)
    notes = Notes.of_host(user)
    # Its interpreter does not exist here: what it would say is noted as if it had been asked.
    package = {name: first.value["neuronx-cc"][name] for name in ("version", "sha256")}
    notes.put("version", {"path": str(other / "neuronx-cc"), **package}, {"version": package["version"]})
    second = identity({**user, "PATH": f"{other}{os.pathsep}{user['PATH']}"})
    assert second.id == first.id
    assert first.value["native_store"] == "torchneuron"


@pytest.mark.parametrize("name", ["neuronxcc/driver.py", "torch_neuronx/_C.py", "nki/language.py"])
def test_one_byte_in_a_package_of_the_same_version_is_another_toolchain(
    site: Path, user: dict[str, str], name: str
) -> None:
    before = identity(user)
    with (site / name).open("a") as file:
        file.write("\n")
    after = identity(user)
    assert after.id != before.id
    assert after.versions == before.versions


def test_another_version_is_another_toolchain_and_back_again_the_first(
    site: Path, user: dict[str, str], tmp_path: Path
) -> None:
    before = identity(user)
    metadata = next(site.glob("torch_neuronx-*.dist-info")) / "METADATA"
    old = metadata.read_text()
    metadata.write_text(old.replace("2.14.0", "2.14.1"))
    assert identity(user).id != before.id
    metadata.write_text(old)
    assert identity(user).id == before.id


def test_caches_and_bytecode_do_not_count(site: Path, user: dict[str, str]) -> None:
    before = identity(user)
    (site / "neuronxcc" / "__pycache__").mkdir(exist_ok=True)
    (site / "neuronxcc" / "__pycache__" / "driver.cpython-311.pyc").write_bytes(b"bytecode")
    assert identity(user).id == before.id


def test_the_runtime_is_a_version_and_no_part_of_the_identity(site: Path, user: dict[str, str], tmp_path: Path) -> None:
    before = identity(user)
    (tmp_path / "libnrt.so.2.31.24.0").touch()
    with_runtime = identity({**user, "LD_LIBRARY_PATH": str(tmp_path)})
    assert with_runtime.id == before.id
    assert with_runtime.versions["runtime"] == "2.31.24.0"
    assert "runtime" not in before.versions


@pytest.mark.parametrize("package", ["torch_neuronx", "neuronx_cc", "nki"])
def test_a_package_without_a_version_is_refused(site: Path, user: dict[str, str], package: str) -> None:
    shutil.rmtree(next(site.glob(f"{package}-*.dist-info")))
    with pytest.raises(Unsupported, match="cannot be told") as told:
        identity(user)
    assert told.value.exit_code == 8


def test_no_compiler_on_path_is_refused(site: Path, user: dict[str, str]) -> None:
    with pytest.raises(Unsupported, match="not on PATH"):
        identity({**user, "PATH": "/nonexistent"})


def test_a_compiler_of_another_environment_is_refused_with_both_versions(
    site: Path, user: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "neuronx-cc").write_text("#!/bin/sh\necho 'NeuronX Compiler version 2.20.1.0+abc'\n")
    (tmp_path / "neuronx-cc").chmod(0o755)
    with pytest.raises(Unsupported, match="two compilers") as told:
        identity({**user, "PATH": f"{tmp_path}{os.pathsep}{user['PATH']}"})
    assert "2.20.1.0+abc" in told.value.message
    assert "2.33.1.0+5f1ab000" in told.value.message


@pytest.mark.parametrize("script", ["exit 1", "echo hello", "echo 'no Version here'"])
def test_a_compiler_that_names_no_version_is_refused(
    site: Path, user: dict[str, str], tmp_path: Path, script: str
) -> None:
    (tmp_path / "neuronx-cc").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "neuronx-cc").chmod(0o755)
    with pytest.raises(Unsupported):
        program_version(tmp_path / "neuronx-cc", user, FORGETFUL, {})


# --- content ------------------------------------------------------------------------------------------------------


def test_content_is_read_again_only_when_a_file_changed(tmp_path: Path, user: dict[str, str]) -> None:
    package = tmp_path / "package"
    package.mkdir()
    binary = package / "compiler.bin"
    binary.write_bytes(b"one")
    os.utime(binary, ns=(1, 1))
    notes = Notes.of_host(user)
    parts = [Tree("package", package)]
    first = content_digest(parts, notes)
    # A note is what tells now; ctime is of this second, so the digest may not have been noted yet.
    assert content_digest(parts, FORGETFUL) == first
    status = binary.stat()
    binary.write_bytes(b"two")
    os.utime(binary, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same mtime: ctime tells
    assert content_digest(parts, notes) != first


def test_a_digest_is_remembered_once_the_files_have_settled(
    tmp_path: Path, user: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiler.bin").write_bytes(b"one")
    notes = Notes.of_host(user)
    monkeypatch.setattr("neffcache.compile.neuron.content.SETTLED_NS", -(10**12))
    first = content_digest([Program("compiler", tmp_path / "compiler.bin")], notes)
    monkeypatch.setattr("neffcache.compile.neuron.content._sha256", lambda path: pytest.fail("it was read again"))
    assert content_digest([Program("compiler", tmp_path / "compiler.bin")], notes) == first


def test_a_fresh_digest_is_not_remembered(tmp_path: Path, user: dict[str, str]) -> None:
    (tmp_path / "compiler.bin").write_bytes(b"one")
    notes = Notes.of_host(user)
    content_digest([Program("compiler", tmp_path / "compiler.bin")], notes)
    assert notes.directory is not None
    assert list(notes.directory.iterdir()) == []


def test_notes_of_somebody_else_are_not_believed(user: dict[str, str]) -> None:
    notes = Notes.of_host(user)
    assert notes.directory is not None
    notes.put("version", "key", {"version": "1"})
    assert notes.get("version", "key") == {"version": "1"}
    notes.directory.chmod(0o777)
    assert Notes.of_host(user).directory is None


@pytest.mark.parametrize("planted", [b"", b"[]", b"\x80\x04N.", b'{"schema": 1, "key": "x", "note": {}}'])
def test_a_note_that_is_none_is_passed_over(user: dict[str, str], planted: bytes) -> None:
    notes = Notes.of_host(user)
    notes.put("version", "key", {"version": "1"})
    assert notes.directory is not None
    (file,) = notes.directory.iterdir()
    file.write_bytes(planted)
    assert notes.get("version", "key") is None


@pytest.mark.parametrize(
    "first", ["#!/opt/a/bin/python3.11", "#!/bin/sh\n'''exec' \"/opt/a b/bin/python3\" \"$0\" \"$@\"\n' '''"]
)
def test_what_an_installer_writes_into_a_scripts_head_does_not_count(tmp_path: Path, first: str) -> None:
    for name, head in (("one", first), ("two", first.replace("/opt/a", "/srv/bb"))):
        (tmp_path / name).write_text(f"{head}\nimport sys\n")
    one, two = (content_digest([Program("script", tmp_path / name)], FORGETFUL) for name in ("one", "two"))
    assert one == two


def test_an_empty_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="has no files"):
        content_digest([Tree("package", tmp_path)], FORGETFUL)


def test_the_compiler_is_asked_once(site: Path, user: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "asked"
    (tmp_path / "neuronx-cc").write_text(f"#!/bin/sh\necho x >> {log}\necho 'version 2.33.1.0+5f1ab000'\n")
    (tmp_path / "neuronx-cc").chmod(0o755)
    given = {**user, "PATH": f"{tmp_path}{os.pathsep}{user['PATH']}"}
    for _ in range(3):
        compiler(given, Notes.of_host(user))
    assert log.read_text() == "x\n"
