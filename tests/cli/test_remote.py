"""push, pull, check, verify and ls with a remote, as people and scripts call them; against SeaweedFS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from neffcache.errors import Miss
from neffcache.flows.remote import RemoteOptions, RemoteSettings
from neffcache.flows.run import _manifest
from neffcache.flows.trust import Trust
from neffcache.flows.warm import Progress
from neffcache.key.canonical import xxh3_128_hex
from neffcache.remote import errors
from neffcache.store import layout
from neffcache.store.local import LocalStore
from neffcache.store.records import Manifest
from scripts.seaweedfs import Server
from tests.cli.conftest import BY_REF, CONFIG, Answer, damage, job_of, put_job, request_of
from tests.remote.conftest import READER
from tests.remote.conftest import credentials as credentials
from tests.remote.conftest import front as front
from tests.remote.conftest import prefix as prefix
from tests.remote.conftest import server as server
from tests.remote.conftest import url as url
from tests.remote.proxy import Proxy, says

Run = Callable[..., Answer]
DOWN = "http://127.0.0.1:1"


@pytest.fixture
def fresh(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path / "fresh", writable=True, given=True)


@pytest.fixture
def pushed(neffcache: Run, store: LocalStore, warmed: Manifest, front: Proxy, url: str) -> Answer:
    done = neffcache("push", CONFIG, *BY_REF, "--dir", store.root, "--remote", url, "--json")
    assert done.code == 0, done.err
    return done


def test_push_and_pull_say_what_they_did(
    neffcache: Run, pushed: Answer, fresh: LocalStore, url: str, warmed: Manifest
) -> None:
    objects = pushed.json["objects"]
    assert objects["planned"] == objects["transferred"] == 2 + 4 + 3
    assert pushed.json["conditional_writes"] is True
    done = neffcache("pull", CONFIG, "--by-ref", *BY_REF, "--dir", fresh.root, "--remote", url, "--json")
    assert done.code == 0
    assert done.json["targets"][0]["state"] == "HIT"
    assert done.json["objects"]["planned"] == done.json["objects"]["transferred"] == 2 + 4 + 1
    assert done.json["requests"]["put"] == done.json["requests"]["list"] == 0
    assert neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", fresh.root).code == 0
    again = neffcache("pull", CONFIG, "--by-ref", *BY_REF, "--dir", fresh.root, "--remote", url)
    assert "0 planned = 0 transferred + 0 present + 0 failed" in again.out
    assert f"{CONFIG}: HIT  manifest {warmed.id[:12]}" in again.out


def test_pull_of_all_of_a_channel_and_of_an_id(
    neffcache: Run, pushed: Answer, tmp_path: Path, url: str, warmed: Manifest
) -> None:
    for number, words in enumerate((["--all"], ["--channel", "current"], ["--manifest", warmed.id])):
        root = tmp_path / f"s{number}"
        assert neffcache("pull", *words, "--dir", root, "--remote", url).code == 0
        assert LocalStore.open(root, writable=False, given=True).manifest_ids() == [warmed.id]


def test_what_the_remote_does_not_have_is_a_miss_and_no_remote_is_not(
    neffcache: Run, pushed: Answer, fresh: LocalStore, url: str
) -> None:
    missing = ("pull", CONFIG, "--set", "training.seq_len=9", "--by-ref", *BY_REF, "--dir", fresh.root)
    done = neffcache(*missing, "--remote", url, "--json")
    assert (done.code, done.json["targets"][0]["state"]) == (3, "MISS")
    down = neffcache(*missing, "--remote", url, "--endpoint-url", DOWN, "--remote-timeout", "0.3", "--json")
    assert (down.code, down.json["error"]) == (4, "Unreachable")
    assert neffcache("pull", CONFIG, "--dir", fresh.root).code == 2
    assert neffcache("pull", "--dir", fresh.root, "--remote", url).code == 2
    assert neffcache("push", "llama3_8b", "--dir", fresh.root, "--remote", url).code == 3


@pytest.mark.parametrize(
    ("policy", "warm", "code"),
    [("fail", True, 4), ("stale-ok", True, 0), ("stale-ok", False, 4), ("compile", False, 0)],
)
def test_what_a_fault_of_the_remote_does_is_a_policy(
    neffcache: Run, store: LocalStore, fresh: LocalStore, warmed: Manifest, policy: str, warm: bool, code: int
) -> None:
    words = ("--remote", "s3://bucket/p", "--endpoint-url", DOWN, "--remote-timeout", "0.3", "--anonymous")
    root = store.root if warm else fresh.root
    done = neffcache("pull", CONFIG, "--by-ref", *BY_REF, "--on-remote-error", policy, *words, "--dir", root, "--json")
    assert done.code == code
    if policy != "fail":
        assert done.json["remote_error"]["error"] == "Unreachable"
        assert done.json["targets"][0]["state"] == ("HIT" if warm else "UNKNOWN")


def test_check_remote_names_what_is_gone(
    neffcache: Run, pushed: Answer, store: LocalStore, front: Proxy, url: str, warmed: Manifest
) -> None:
    words = ("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--remote", url, "--json")
    done = neffcache(*words)
    assert done.code == 0
    [row] = done.json
    assert (row["state"], row["tier"], row["by"], row["local"]) == ("HIT", "remote", "ref", "HIT")
    assert row["manifest"] == warmed.id
    remote = RemoteSettings.read(RemoteOptions(remote=url), {}).open()
    for item in list(remote.client.names("packs")):
        remote.client.delete(item.name)
    done = neffcache(*words)
    assert (done.code, done.json[0]["state"]) == (3, "PARTIAL")
    assert {entry["kind"] for entry in done.json[0]["missing"]} == {"blob"}
    other = neffcache(
        *words[:2], "--set", "training.seq_len=9", "--by-ref", *BY_REF, "--dir", store.root, "--remote", url, "--json"
    )
    assert (other.code, other.json[0]["state"]) == (3, "UNKNOWN")
    front.on(says(403, "AccessDenied"))
    assert neffcache(*words).code == 4


def test_remote_without_a_url_is_the_one_of_the_settings(
    neffcache: Run, pushed: Answer, store: LocalStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFCACHE_REMOTE", url)
    done = neffcache("check", "--remote", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json")
    assert (done.code, done.json[0]["tier"]) == (0, "remote")
    assert neffcache("check", CONFIG, "--by-ref", *BY_REF, "--dir", store.root, "--json").json[0]["tier"] == "local"
    assert neffcache("check", "--remote", "--all", "--dir", store.root).code == 0
    assert neffcache("check", "--all", "--dir", store.root).code == 2
    listed = neffcache("ls", "--remote", "--dir", store.root, "--json").json
    assert listed["compared"] == {"both": 1, "remote_only": 0, "local_only": 0}
    assert [(row["channel"], row["config"]) for row in listed["refs"]] == [("current", CONFIG)]


def test_verify_remote_finds_damage_and_push_repair_heals_it(
    neffcache: Run, pushed: Answer, store: LocalStore, url: str
) -> None:
    assert neffcache("verify", "--remote", url).code == 0
    remote = RemoteSettings.read(RemoteOptions(remote=url), {}).open()
    name = next(item.name for item in remote.client.names("packs"))
    for item in list(remote.client.names("packs")):
        data = bytearray(remote.client.read(item.name)[0])  # type: ignore[index]
        data[0] ^= 1
        from neffcache.key.canonical import sha256_hex

        remote.client.put(item.name, bytes(data), sha256_hex(bytes(data)), size=len(data))
    done = neffcache("verify", "--remote", url, "--json")
    assert (done.code, done.json["good"], done.json["blobs"]["damaged"]) == (7, False, 1)
    repaired = neffcache("push", CONFIG, *BY_REF, "--repair", "--dir", store.root, "--remote", url, "--json")
    assert repaired.code == 0
    assert len(repaired.json["repaired"]) >= 1
    assert neffcache("verify", "--remote", url).code == 0
    assert name


# run --pull, as far as it needs no TorchTitan


def settings_of(**given: object) -> RemoteSettings:
    return RemoteSettings.read(RemoteOptions(remote_timeout=0.3 if "endpoint_url" in given else 60, **given), {})  # type: ignore[arg-type]


class Notes(Progress):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def test_a_warm_store_asks_no_remote(store: LocalStore, warmed: Manifest) -> None:
    down = settings_of(remote="s3://bucket/p", endpoint_url=DOWN, anonymous=True)
    made, on_miss = _manifest(job_of(request_of()), store, {}, "fail", down, Trust(), Notes())
    assert (made.id, on_miss) == (warmed.id, "fail")


def test_a_cold_store_pulls(pushed: Answer, fresh: LocalStore, url: str, warmed: Manifest) -> None:
    made, _ = _manifest(job_of(request_of()), fresh, {}, "fail", settings_of(remote=url), Trust(), Notes())
    assert made.id == warmed.id
    assert fresh.missing(made) == []


def test_damage_is_healed_before_a_run(pushed: Answer, store: LocalStore, url: str, warmed: Manifest) -> None:
    record = store.get_graph(xxh3_128_hex(b"one"))
    assert record is not None
    damage(store.root / layout.blob_name(record.artifacts[0].sha256))
    found = LocalStore.open(store.root, writable=True, given=True)
    made, _ = _manifest(job_of(request_of()), found, {}, "fail", settings_of(remote=url), Trust(), Notes())
    assert made.id == warmed.id
    assert found.damaged(made) == []
    assert len(found.quarantined()) == 1


@pytest.mark.parametrize("policy", ["fail", "stale-ok", "compile"])
def test_a_cold_store_and_no_remote_is_the_remotes_fault(
    fresh: LocalStore, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def cold(job: object, store: object, environ: object, on_miss: str, progress: object) -> Manifest:
        seen.append(on_miss)
        if on_miss == "fail":
            raise Miss("cold")
        return put_job(fresh, job_of(request_of()), "one", complete=False)

    monkeypatch.setattr("neffcache.flows.run.manifest_to_run", cold)
    down = settings_of(remote="s3://bucket/p", endpoint_url=DOWN, anonymous=True, on_remote_error=policy)
    arguments = (job_of(request_of()), fresh, {}, "fail", down, Trust(), Notes())
    if policy == "compile":
        assert _manifest(*arguments)[1] == "compile"
    else:
        with pytest.raises(errors.Unreachable):
            _manifest(*arguments)
    assert seen == {"fail": [], "stale-ok": ["fail"], "compile": ["compile"]}[policy]


# Settings


@pytest.mark.fast
def test_settings_of_the_remote_have_the_usual_precedence(tmp_path: Path) -> None:
    (tmp_path / "neffcache.toml").write_text('remote = "s3://file/p"\nremote_timeout = 5\nanonymous = true\n')
    environ = {"NEFFCACHE_REMOTE": "s3://variable/p"}
    found = RemoteSettings.read(RemoteOptions(remote="s3://option/p"), environ, directory=tmp_path)
    assert (found.remote, found.values["remote"].origin) == ("s3://option/p", "--remote")
    found = RemoteSettings.read(RemoteOptions(), environ, directory=tmp_path)
    assert (found.remote, found.values["remote"].origin) == ("s3://variable/p", "NEFFCACHE_REMOTE")
    access = RemoteSettings.read(RemoteOptions(), {}, directory=tmp_path).open().client.access
    assert (access.timeout, access.anonymous, access.transfers) == (5.0, True, 8)


@pytest.mark.fast
@pytest.mark.parametrize(
    "variables",
    [{"NEFFCACHE_ON_REMOTE_ERROR": "ignore"}, {"NEFFCACHE_SSE": "yes"}, {"NEFFCACHE_REMOTE_TIMEOUT": "soon"},
     {"NEFFCACHE_TRANSFERS": "0"}, {"NEFFCACHE_ANONYMOUS": "perhaps"}, {"NEFFCACHE_REMOTE": "http://x"}],
)  # fmt: skip
def test_a_setting_that_is_not_understood_is_usage(neffcache: Run, tmp_path: Path, variables: dict[str, str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("NEFFCACHE_REMOTE", "s3://bucket/p")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert neffcache("ls", "--remote", "--dir", tmp_path / "s").code == 2


def remote_findings(answer: Answer) -> list[dict[str, str]]:
    return [finding for finding in answer.json["findings"] if finding["area"] == "remote"]


def test_doctor_says_who_asks_and_what_they_may_do(
    neffcache: Run, store: LocalStore, server: Server, front: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFCACHE_REMOTE", url)
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 0, done.err
    (said,) = remote_findings(done)
    assert said["state"] == "ok"
    assert said["said"].endswith("may get, list, put, delete")
    for name, value in server.environment(READER).items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    (said,) = remote_findings(neffcache("doctor", "--dir", store.root, "--json"))
    assert said["said"].endswith("may get; may not list, put, delete")


def test_doctor_names_a_remote_that_does_not_answer(
    neffcache: Run, store: LocalStore, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEFFCACHE_REMOTE", "s3://cache/team")
    monkeypatch.setenv("NEFFCACHE_REMOTE_TIMEOUT", "0.3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", DOWN)
    done = neffcache("doctor", "--dir", store.root, "--json")
    assert done.code == 4
    (said,) = remote_findings(done)
    assert said["state"] == "error"
    assert "no connection" in said["said"]
