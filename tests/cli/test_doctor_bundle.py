"""`doctor --bundle`: everything for a support thread in one archive, and of planted secrets nothing."""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.flows import support
from neffcache.store.index import Failure, Index
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from tests.cli.conftest import Answer
from tests.cli.test_completion import shell as shell
from tests.cli.test_redact import PEM, SECRETS

Run = Callable[..., Answer]
PASSWORD, USER, HOST = "hunter2pass", "janedoe", "trainer-17"
QUERY_SIGNATURE = "0f0f0f0f0f0f0f0f"
BEARER = "abc.def-ghi"
MEMBERS = {
    "README.txt",
    "config/neffcache.toml",
    "doctor.json",
    "environment.json",
    "failures.json",
    "failures/01.log",
    "included/01.txt",
    "remote.json",
    "runs/01/log-00.txt",
    "runs/01/report-00.json",
    "settings.json",
    "store.json",
    "versions.json",
}


@pytest.fixture
def planted(store: LocalStore, warmed: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Secrets in every place that a bundle looks at; what must not be found."""
    home = tmp_path / USER
    (home / ".aws").mkdir(parents=True)
    monkeypatch.chdir(home)
    monkeypatch.setattr(socket, "gethostname", lambda: f"{HOST}.example.internal")
    endpoint = f"http://minio:{PASSWORD}@127.0.0.1:1"
    for name, value in {
        "HOME": str(home),
        "USER": USER,
        "NEFFCACHE_DIR": str(store.root),
        "NEFFCACHE_REMOTE": "s3://bucket/prefix",
        "NEFFCACHE_REMOTE_TIMEOUT": "0.2",
        "AWS_ACCESS_KEY_ID": SECRETS["AWS key id"],
        "AWS_SECRET_ACCESS_KEY": SECRETS["AWS secret key"],
        "AWS_SESSION_TOKEN": SECRETS["session token"],
        "AWS_ENDPOINT_URL": endpoint,
        "HF_TOKEN": SECRETS["Hugging Face token"],
        "NEURON_PRIVATE_TOKEN": "words of somebody",
        "UNRELATED": "a diary",
        "PATH": f"{home}/bin:/usr/bin:/bin",
    }.items():
        monkeypatch.setenv(name, value)
    (home / "neffcache.toml").write_text(f'endpoint_url = "{endpoint}/?X-Amz-Signature={QUERY_SIGNATURE}"\n')
    (home / ".aws" / "credentials").write_text("[x]\naws_secret_access_key = in the file only\n")
    log = "\n".join(
        [
            "INFO starting on " + HOST + " as " + USER + f" in {home}/job",
            *(f"DEBUG {kind} is {secret}" for kind, secret in SECRETS.items()),
            f"Authorization: Bearer {BEARER}",
            f"GET https://b.s3.amazonaws.com/key?X-Amz-Signature={QUERY_SIGNATURE}",
            f"connecting to {endpoint}",
            "the file said: in the file only",
            PEM,
            "ERROR NCC_EXTP004: too many instructions",
        ]
    )
    with Index.open(store) as index:
        for number in range(2):
            blob = store.put_blob(f"{log}\n{number}".encode())
            message = f"the compiler refuses {SECRETS['AWS key id']} of {USER}"
            index.put_failure(f"{number:032}", Failure("b" * 64, "NCC_EXTP004", message, blob, time.time() + number))
    run = store.root / "runs" / f"42cc38b4441a-{SECRETS['Hugging Face token']}"
    (run / "reports").mkdir(parents=True)
    report = {"schema": 1, "rank": 0, "error": {"message": log, "token": "short one"}}
    (run / "reports" / "rank-0.json").write_text(json.dumps(report))
    (run / "torchrun.log").write_text(log)
    (home / f"{PASSWORD}.log").write_text(log)
    return [
        *SECRETS.values(), PASSWORD, USER, HOST, QUERY_SIGNATURE, BEARER, "MIIEow", "words of somebody", "a diary",
        "in the file only", "short one", str(home),
    ]  # fmt: skip


def opened(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        for entry in archive:
            assert (entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, 0, "", "")
        return {entry.name: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]


def test_of_planted_secrets_nothing_is_in_it_and_what_a_thread_needs_is(
    neffcache: Run, store: LocalStore, warmed: Manifest, planted: list[str], tmp_path: Path
) -> None:
    before = {path: path.lstat().st_mtime_ns for path in store.root.rglob("*")}
    target = tmp_path / "bundle.tar.gz"
    done = neffcache("doctor", "--bundle", target, "--include", f"{PASSWORD}.log", "--json")
    assert done.code == done.json["exit_code"] == 4, "the remote is down, and the bundle is made"
    members = opened(target)
    assert set(members) == {*MEMBERS, "failures/02.log"}
    assert done.json["bundle"]["members"] == sorted(members)
    everything = "\n".join([*members, *members.values()])
    for secret in planted:
        assert secret not in everything, secret
    raw = gzip.decompress(target.read_bytes()).decode(errors="replace")
    assert not [secret for secret in planted if secret in raw]
    assert target.stat().st_mode & 0o777 == 0o600
    assert {path: path.lstat().st_mtime_ns for path in store.root.rglob("*")} == before

    for name in ("failures/01.log", "included/01.txt", "runs/01/log-00.txt", "runs/01/report-00.json"):
        assert "ERROR NCC_EXTP004: too many instructions" in members[name]
    environment = json.loads(members["environment.json"])
    assert environment["AWS_SECRET_ACCESS_KEY"] == environment["HF_TOKEN"] == "<set>"
    assert environment["PATH"] == "~/bin:/usr/bin:/bin"
    assert environment["NEFFCACHE_REMOTE"] == "s3://bucket/prefix"
    assert "UNRELATED" not in environment
    settings = {row["name"]: (row["value"], row["origin"]) for row in json.loads(members["settings.json"])}
    assert settings["remote"] == ("s3://bucket/prefix", "NEFFCACHE_REMOTE")
    assert settings["endpoint_url"][1] == "neffcache.toml"
    assert json.loads(members["remote.json"])["fault"]["exit_code"] == 4
    assert json.loads(members["store.json"])["listed"]["manifests"][0]["id"] == warmed.id
    assert [row["code"] for row in json.loads(members["failures.json"]).values()] == ["NCC_EXTP004"] * 2
    assert json.loads(members["versions.json"])["packages"]["click"]
    assert json.loads(members["doctor.json"])["findings"]


def test_equal_content_gives_equal_bytes(neffcache: Run, store: LocalStore, tmp_path: Path) -> None:
    members = {"b": b"2", "a/x": b"1"}
    assert support.archive(members) == support.archive(dict(reversed(members.items())))
    with tarfile.open(fileobj=io.BytesIO(support.archive(members))) as tar:
        assert tar.getnames() == ["a/x", "b"]


def test_without_a_store_and_without_a_remote_it_has_the_same_heads(
    neffcache: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = neffcache("doctor", "--dir", tmp_path / "none", "--bundle", tmp_path / "b.tar.gz")
    assert done.code == 0
    assert "look through it before you send it" in done.err
    assert set(opened(tmp_path / "b.tar.gz")) == {name for name in MEMBERS if name.partition("/")[0] not in
                                                  ("failures", "included", "runs")}  # fmt: skip


def test_a_password_that_is_a_word_of_ours_stops_nothing(
    neffcache: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, word in {"A_PASSWORD": "doctor", "B_PASSWORD": "remove", "C_PASSWORD": "settings"}.items():
        monkeypatch.setenv(name, word)
    done = neffcache("doctor", "--dir", tmp_path / "none", "--bundle", tmp_path / "b.tar.gz")
    assert done.code == 0, done.err
    members = opened(tmp_path / "b.tar.gz")
    assert "settings" not in "".join(members.values())


def test_long_texts_are_cut_between_lines(tmp_path: Path) -> None:
    long = tmp_path / "log"
    long.write_text("".join(f"line {number}\n" for number in range(400_000)))
    text = support._file(long)
    assert text is not None
    assert len(text) <= support.TEXT_BYTES + 100
    assert text.startswith("line 0\n")
    assert text.endswith("line 399999\n")
    assert all(line.startswith("line ") or line == "[... left out ...]" for line in text.splitlines())


def test_a_secret_that_redaction_would_miss_stops_the_bundle(
    neffcache: Run, planted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support.Redactor, "text", lambda self, text: text)
    done = neffcache("doctor", "--bundle", tmp_path / "b.tar.gz", "--json")
    assert done.code == 1
    assert "still holds a secret" in done.json["message"]
    assert not (tmp_path / "b.tar.gz").exists()


@pytest.mark.parametrize("words", [("--include", "x"), ("--bundle", "there"), ("--bundle", "none/b.tar.gz")])
def test_what_it_cannot_do_is_a_usage_error(
    neffcache: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("somebody's")
    (tmp_path / "x").write_text("a log")
    done = neffcache("doctor", "--dir", tmp_path / "store", *words, "--json")
    assert done.code == 2
    assert done.json["hint"]
    assert (tmp_path / "there").read_text() == "somebody's"


def test_a_full_disk_leaves_no_half_of_a_bundle(
    neffcache: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: object) -> int:
            super().write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(support, "open", Full, raising=False)
    done = neffcache("doctor", "--dir", tmp_path / "store", "--bundle", tmp_path / "b.tar.gz", "--json")
    assert done.code == 2
    assert "No space left" in done.json["message"]
    assert not (tmp_path / "b.tar.gz").exists()


PAGES = ("how-to/completion.md", "how-to/support.md", "reference/doctor.md")


def shown() -> list[str]:
    docs = Path(__file__).resolve().parents[2] / "docs"
    blocks = re.findall(r"```sh\n(.*?)```", "".join((docs / page).read_text() for page in PAGES), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", sorted(set(shown())))
def test_what_the_pages_show_runs_as_written(
    line: str, shell: dict[str, str], warmed: Manifest, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=shell, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "--bundle" in line:
        assert "doctor.json" in opened(tmp_path / "support.tar.gz")
