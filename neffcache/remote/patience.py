"""How long a remote may keep us waiting: full jitter under one cap, counted from the last sign of life."""

from __future__ import annotations

import random
import threading
import time

from neffcache.remote.errors import Fault

FIRST, LONGEST = 0.1, 20.0  # seconds; the n-th pause is drawn from [0, min(LONGEST, FIRST * 2**n)]


class Patience:
    """Shared by all requests to one remote. When two of them waited `seconds` in vain and none succeeded meanwhile, the
    remote is given up: what is still waiting ends at once instead of each after its own time. One alone is a thing
    that fails, not a remote that is gone."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._last_success = time.monotonic()
        self._in_vain = 0
        self._given_up: Fault | None = None
        self._woken = threading.Event()

    def trying(self) -> Trying:
        """A new operation. Raises the fault that the remote was given up for."""
        self.check()
        return Trying(self)

    def check(self) -> None:
        """Raises the fault that the remote was given up for, if it was."""
        if self._given_up is not None:
            raise self._given_up

    def succeeded(self) -> None:
        self._last_success = time.monotonic()
        self._in_vain = 0

    def ended(self, fault: Fault, since: float) -> None:
        """An operation that began (or last got something) at `since` has lost its patience."""
        with self._lock:
            if self._last_success < since:
                self._in_vain += 1
            if self._given_up is None and self._in_vain > 1:
                self._given_up = fault
                self._woken.set()

    def sleep(self, seconds: float) -> None:
        """Wait, or raise the fault that the remote was given up for meanwhile."""
        if self._woken.wait(seconds) and self._given_up is not None:
            raise self._given_up


class Trying:
    """One operation with its retries."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since = time.monotonic()
        self._pauses = 0

    def progress(self) -> None:
        """Something arrived: the time begins anew, and so do the pauses."""
        self._since = time.monotonic()
        self._pauses = 0
        self._patience.succeeded()

    def again(self, fault: Fault) -> None:
        """Wait before the next attempt. Raises `fault` when no retry helps or the time is over."""
        if not fault.passing:
            raise fault
        pause = random.uniform(0, min(LONGEST, FIRST * 2**self._pauses))
        self._pauses += 1
        pause = max(pause, fault.retry_after or 0.0)
        if time.monotonic() + pause > self._since + self._patience.seconds:
            self._patience.ended(fault, self._since)
            raise fault
        self._patience.sleep(pause)
