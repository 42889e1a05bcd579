"""No setting of the user reaches a test, and no file of a test reaches the user."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

# Set before anything is collected: a module under test may read the environment while it is imported.
FORGOTTEN_PREFIXES = ("AWS_", "NEURON_", "NEFFCACHE_", "TORCH_NEURONX_", "NKI_", "XLA_", "TORCHINDUCTOR_")
FORGOTTEN = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "OMP_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_LOGS", "PYTHONHASHSEED",
    }
)  # fmt: skip
PLACES = {
    "HOME": "home",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "cache",
    "NEFFCACHE_DIR": "neffcache",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
HAS_TORCH = importlib.util.find_spec("torch") is not None
# What is left of the suite where torch is not installed (scripts/test runs it so on a newer Python).
CORE = ("cli", "key", "remote", "store")

# A machine under load is slow, not wrong.
hypothesis.settings.register_profile("neffcache", deadline=None)
hypothesis.settings.load_profile("neffcache")

_fresh = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    fresh = Path(tempfile.mkdtemp(prefix="nc-"))
    config.stash[_fresh] = fresh
    for name in list(os.environ):
        if name.startswith(FORGOTTEN_PREFIXES) or name in FORGOTTEN:
            del os.environ[name]
    for name, folder in PLACES.items():
        if name != "NEFFCACHE_DIR":  # a store makes its own root
            (fresh / folder).mkdir()
        os.environ[name] = str(fresh / folder)
    # No test looks for credentials on the network.
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    # The root of tmp_path is chosen after this, inside the new TMPDIR.
    tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    fresh = config.stash[_fresh]
    os.environ["TMPDIR"] = str(fresh.parent)
    tempfile.tempdir = None
    # Tests leave read-only folders, which rmtree would not empty.
    for folder, inner, _ in os.walk(fresh):
        for name in inner:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(fresh, ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where torch is not installed, only the core rooms' tests and those of the frame are collected."""
    tests = Path(__file__).parent
    if HAS_TORCH or not collection_path.is_relative_to(tests):
        return None
    inside = collection_path.relative_to(tests).parts
    return True if len(inside) > 1 and inside[0] not in CORE else None


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if HAS_TORCH else f"torch is not installed: of the folders here only {', '.join(CORE)} are collected"
