"""How much memory and how many CPUs there are, as control groups of both versions say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neffcache.compile import memory
from neffcache.compile.schedule import Forecast, forecast, next_to_start

pytestmark = pytest.mark.fast

GB = 1_000_000_000


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 100000000 kB\nMemAvailable: 64000000 kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_limit_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert memory.available(root) == memory.Amount(64_000_000 * 1024, "the machine's free memory")
    assert memory.available(tmp_path / "nothing").value > 0
    assert memory.available().value > 0


@pytest.mark.parametrize("seen", ["kubepods/pod1", ""], ids=["from the host", "inside a container"])
def test_version_2_counts_cache_that_can_be_dropped_as_free(tmp_path: Path, seen: str) -> None:
    group = f"sys/fs/cgroup/{seen}".rstrip("/")
    root = machine(
        tmp_path,
        "0::/kubepods/pod1\n",
        {
            f"{group}/memory.max": f"{10 * GB}\n",
            f"{group}/memory.current": f"{6 * GB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {2 * GB}\n",
            f"{group}/memory.events": "oom 3\noom_kill 2\n",
        },
    )
    assert memory.available(root) == memory.Amount(6 * GB, "the limit of the control group (v2)")
    assert memory.killed_count(root) == 2


def test_the_tightest_group_above_counts_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/a/b\n",
        {
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "1\n",
            "sys/fs/cgroup/a/memory.max": f"{3 * GB}\n",
            "sys/fs/cgroup/a/memory.current": f"{1 * GB}\n",
        },
    )
    assert memory.available(root).value == 2 * GB


def test_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/1"
    root = machine(
        tmp_path,
        "9:name=systemd:/\n4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n",
        {
            f"{group}/memory.limit_in_bytes": f"{8 * GB}\n",
            f"{group}/memory.usage_in_bytes": f"{5 * GB}\n",
            f"{group}/memory.stat": f"cache 1\ntotal_inactive_file {1 * GB}\n",
            f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory.available(root) == memory.Amount(4 * GB, "the limit of the control group (v1)")
    assert memory.killed_count(root) == 7


def test_a_cpu_quota_is_a_number_of_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = machine(tmp_path, "0::/pod\n", {"sys/fs/cgroup/pod/cpu.max": "350000 100000\n"})
    assert memory.cpus(root) == memory.Amount(4, "the quota of the control group (v2)")
    (root / "sys/fs/cgroup/pod/cpu.max").write_text("max 100000\n")
    assert memory.cpus(root) == memory.Amount(64, "the CPU affinity")


def test_what_starts_next_fits_and_passes_nobody_who_would_then_wait_longer() -> None:
    assert next_to_start([], [], 10) is None
    assert next_to_start([50], [], 10) == 0, "alone it may always try"
    assert next_to_start([5, 1], [6], None) == 0, "who said --jobs answers for it"
    assert next_to_start([5], [6], 10) is None
    assert next_to_start([5, 4], [6], 10) == 1
    assert next_to_start([8, 3], [6], 10) is None, "3 would keep 8 waiting after 6 has ended"
    assert next_to_start([8, 2], [6], 10) == 1


def test_a_forecast_is_what_the_pool_would_do() -> None:
    assert forecast([], 2, None) == Forecast(0.0, 0, 0)
    units = [(3.0, 4), (3.0, 4), (2.0, 4), (2.0, 4), (2.0, 4)]
    assert forecast(units, 2, None) == Forecast(7.0, 8, 2)
    assert forecast(units, 2, 7) == Forecast(12.0, 4, 1)
    assert forecast(units, 5, 12) == Forecast(5.0, 12, 3)
