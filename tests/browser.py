"""Headless Chromium for the tests of pages: one command, or a page that is driven through the DevTools protocol.

The protocol goes over two pipes (`--remote-debugging-pipe`), so that no package and no port is needed for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ABSENT = "there is no chromium"
SECONDS = 120.0  # until a page counts as hung


def command(profile: Path, *words: str) -> list[str]:
    assert PROGRAM is not None
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
    return [PROGRAM, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet),
            f"--user-data-dir={profile}", "--window-size=1100,1400", *words]  # fmt: skip


def browse(profile: Path, *words: str) -> str:
    """Run it once; its standard output."""
    return subprocess.run(command(profile, *words), capture_output=True, text=True, timeout=180, check=True).stdout


class Page:
    """One open page. `complaints` are errors of its console, `requests` the URLs that it asked for."""

    def __init__(self, process: subprocess.Popen[bytes], send: int, receive: int) -> None:
        self._process, self._send, self._receive = process, send, receive
        self._number, self._rest, self._session = 0, b"", ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser; what it answers."""
        self._number += 1
        wanted = self._number
        session = {"sessionId": self._session} if self._session else {}
        message = json.dumps({"id": wanted, "method": method, "params": parameters, **session})
        os.write(self._send, message.encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == wanted:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._happened(answer.get("method", ""), answer.get("params", {}))

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({url!r})")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression holds; a page in between two documents has none."""
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(AssertionError):
                if self.evaluate(script):
                    return
            assert time.monotonic() < deadline, f"never: {script}; {self.complaints}"
            select.select([], [], [], 0.05)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert self._process.poll() is None, "chromium ended"
            assert time.monotonic() < deadline, "chromium does not answer"
            if select.select([self._receive], [], [], 1)[0]:
                self._rest += os.read(self._receive, 1 << 20)
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _happened(self, event: str, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:500])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(about["args"])[:500])


@contextlib.contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, for which no name but this host's exists."""
    ours, theirs = os.pipe(), os.pipe()  # to the browser, and from it
    words = command(profile, "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    process = subprocess.Popen(
        # The browser speaks on file descriptors 3 and 4.
        ["bash", "-c", f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]} {ours[0]}<&- {theirs[1]}>&-', "bash", *words],
        pass_fds=(ours[0], theirs[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(ours[0])
    os.close(theirs[1])
    try:
        yield Page(process, ours[1], theirs[0])
    finally:
        os.close(ours[1])
        _end(process.wait, process.kill)
        os.close(theirs[0])


def _end(wait: Callable[..., int], kill: Callable[[], None]) -> None:
    """It ends with its pipe; if not, by force."""
    try:
        wait(timeout=20)
    except subprocess.TimeoutExpired:
        kill()
        wait()
