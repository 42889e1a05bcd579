"""The stub compiler, fresh for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stubs.stub import Stub


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub.install(tmp_path / "stub")
