"""The examples in docs/examples: the schemas of Kubernetes accept them, and what they start is started as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from neffcache.flows.request import make_request, parse_versions
from neffcache.store.local import LocalStore
from tests.cli.conftest import BY_REF, CONFIG, Answer, job_of, put_job

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
NEWEST = kubernetes_validate.latest_version()

Run = Callable[..., Answer]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(path: Path) -> Iterator[dict[str, Any]]:
    for document in documents(path):
        if document["kind"] == "Job":
            yield document["spec"]["template"]["spec"]


def versions_of(path: Path) -> list[str]:
    [config] = [item for item in documents(path) if item["kind"] == "ConfigMap"]
    return [line for line in config["data"]["NEFFCACHE_VERSIONS"].splitlines() if line]


@pytest.mark.fast
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_accepts_them_strictly(path: Path) -> None:
    assert len(documents(path)) == 2
    for document in documents(path):
        kubernetes_validate.validate(document, NEWEST, strict=True)
    broken = documents(path)[1]
    broken["spec"]["template"]["spec"]["initContainer"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


@pytest.mark.fast
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_init_is_closed_in_and_the_trainer_only_reads(path: Path) -> None:
    for pod in pods(path):
        [init], [trainer] = pod["initContainers"], pod["containers"]
        secured = init["securityContext"]
        assert secured["readOnlyRootFilesystem"] is True
        assert secured["allowPrivilegeEscalation"] is False
        assert secured["capabilities"] == {"drop": ["ALL"]}
        volumes = {item["name"]: item for item in pod["volumes"]}
        assert ("hostPath" in volumes["neff"]) == (secured["runAsUser"] == 0), "only what is root's needs root"
        [mount] = [item for item in trainer["volumeMounts"] if item["name"] == "neff"]
        assert mount["readOnly"] is True
        assert trainer["securityContext"]["runAsUser"] not in (0, secured["runAsUser"])
        assert {item["value"] for item in (*init["env"], *trainer["env"]) if item["name"] == "NEFFCACHE_DIR"} == {
            mount["mountPath"]
        }


@pytest.mark.fast
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_init_does_what_the_example_says_for_the_job_that_the_trainer_runs(
    neffcache: Run, store: LocalStore, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pod] = pods(path)
    words = [str(word) for word in pod["initContainers"][0]["args"]]
    trainer = [str(word) for word in pod["containers"][0]["command"]][2:]
    common = words[1 : words.index("--jitter")] if "--jitter" in words else words[1:]
    assert common == trainer, "init and trainer choose the same job"
    world = {"world_size": int(trainer[trainer.index("--world-size") + 1])} if "--world-size" in trainer else {}
    request = make_request("llama3_8b", lnc=2, toolchain="neuron", environ={}, **world)
    versions = parse_versions(versions_of(path))
    made = put_job(store, replace(job_of(request), versions=versions), "one")
    monkeypatch.setenv("NEFFCACHE_VERSIONS", "\n".join(versions_of(path)))
    monkeypatch.setenv("NEFFCACHE_REMOTE", str(store.root))
    monkeypatch.setenv("NEFFCACHE_DIR", str(tmp_path / "neff"))
    monkeypatch.setattr("neffcache.flows.init.spread", lambda seconds: None)
    done = neffcache(*words)
    assert (done.code, done.json["manifest"]) == (0, made.id), done.json


@pytest.mark.fast
def test_the_image_is_the_core_with_signatures_and_no_root() -> None:
    text = (EXAMPLES / "Dockerfile.slim").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines] == (
        ["FROM", "COPY", "RUN", "FROM", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"]
    )
    assert "torch" not in "".join(lines)
    assert '"/src[sign]"' in text
    assert re.search(r"^USER 65532:65532$", text, flags=re.MULTILINE)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A directory with `neffcache` in it, for PATH."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "neffcache").write_text(f'#!/bin/sh\nexec {sys.executable} -m neffcache.cli.main "$@"\n')
    (place / "neffcache").chmod(0o755)
    return place


@pytest.fixture
def prolog(store: LocalStore, program: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(**changed: str | None) -> tuple[int, str]:
        environ: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{program}:{os.environ['PATH']}",
            "NEFFCACHE_INIT": " ".join([CONFIG, "--toolchain", "host"]),
            "NEFFCACHE_VERSIONS": "; ".join(BY_REF[index] for index in (3, 5, 7)),
            "NEFFCACHE_REMOTE": str(store.root),
            "NEFFCACHE_NODE_DIR": str(tmp_path / "node"),
            **changed,
        }
        done = subprocess.run(
            [str(EXAMPLES / "slurm" / "task_prolog.sh")],
            env={name: value for name, value in environ.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def test_the_prolog_fills_the_node_and_tells_the_task_where(
    prolog: Callable[..., tuple[int, str]], warmed: Any, tmp_path: Path
) -> None:
    assert prolog() == (0, f"export NEFFCACHE_DIR={tmp_path / 'node'}\n")
    assert (tmp_path / "node" / "views" / warmed.id / "ready.json").exists()


def test_the_prolog_never_fails_a_node(prolog: Callable[..., tuple[int, str]], program: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = (
        {"NEFFCACHE_NODE_DIR": str(tmp_path / "file")},  # a broken store: 7
        {"NEFFCACHE_REMOTE": str(tmp_path / "nowhere")},
        {},  # nobody warmed it: 3
    )
    for changed in broken:
        code, out = prolog(**changed)
        assert code == 0
        assert out.startswith("print neffcache init ended with ")
        assert "export" not in out
    (program / "neffcache").unlink()
    assert prolog(PATH="/usr/bin:/bin")[0] == 0
    (program / "neffcache").write_text("#!/bin/sh\nexec sleep 60\n")
    (program / "neffcache").chmod(0o755)
    code, out = prolog(NEFFCACHE_PROLOG_SECONDS="0.1")
    assert code == 0
    assert "ended with 124" in out
    (program / "neffcache").write_text("#!/bin/sh\nkill -TERM $(ps -o ppid= -p $PPID)\nexec sleep 60\n")
    assert prolog()[0] == 0, "the prolog itself is told to end"


@pytest.mark.fast
@pytest.mark.parametrize("lacking", ["NEFFCACHE_INIT", "NEFFCACHE_REMOTE"])
def test_a_job_that_does_not_ask_for_it_is_left_alone(prolog: Callable[..., tuple[int, str]], lacking: str) -> None:
    assert prolog(**{lacking: None}) == (0, "")


@pytest.mark.fast
@pytest.mark.parametrize("script", ["task_prolog.sh", "job.sh"])
def test_the_scripts_parse_and_can_be_run(script: str) -> None:
    path = EXAMPLES / "slurm" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)


def test_the_slurm_job_starts_the_prolog_and_a_run_of_the_same_job(tmp_path: Path) -> None:
    """With a `srun` and a `scontrol` that only say what they were given."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0|$NEFFCACHE_INIT|$NEFFCACHE_VERSIONS|$*"\n')
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(EXAMPLES / "slurm" / "job.sh")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    _, init, versions, words = done.stdout.strip().split("|", 3)
    job = init.removesuffix(" --jitter 20")
    assert f"neffcache run {job} -- torchrun" in words
    assert "--task-prolog=/etc/slurm/neffcache_task_prolog.sh" in words
    assert parse_versions(versions.split("; ")).keys() == {"torch", "torchtitan", "compiler"}
    config, *rest = job.split()
    assert (config, rest[:4]) == ("llama3_8b", ["--lnc", "2", "--nodes", "2"])
