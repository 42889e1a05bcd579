"""A compiler process is waited for, whatever the kernel offers, and is reaped by nobody but its owner."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from neffcache.compile.neuron.driver import _ends


@pytest.mark.parametrize("modern", [True, False])
def test_the_end_of_a_child_is_seen_and_left_to_be_reaped(modern: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not modern:

        def refused(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refused)
    process = subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with _ends(process.pid) as ended:
        assert not ended(0.05)
        assert process.stdin is not None
        process.stdin.close()
        deadline = time.monotonic() + 60
        while not ended(1.0):
            assert time.monotonic() < deadline
        assert ended(0.0), "it is still there to be asked again"
    assert process.wait() == 1
