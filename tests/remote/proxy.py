"""A proxy in front of a real S3 server that does to chosen requests what networks and services do."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

Action = Callable[["Handler", str, bytes], None]


@dataclass
class Rule:
    """What happens to requests of `method` whose path holds `part`: `times` of them (None: all), after `skip`."""

    action: Action
    method: str = ""
    part: str = ""
    times: int | None = None
    skip: int = 0
    used: int = 0

    def takes(self, method: str, path: str) -> bool:
        if (self.method and method != self.method) or self.part not in path:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.used >= self.times:
            return False
        self.used += 1
        return True


@dataclass
class Proxy:
    """`seen` are (method, path, range) of every request, in order of arrival."""

    upstream: int
    port: int = 0
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, action: Action, method: str = "", part: str = "", *, times: int | None = None, skip: int = 0) -> Rule:
        rule = Rule(action, method, part, times, skip)
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        self.rules.clear()
        self.seen.clear()

    def count(self, method: str, part: str = "") -> int:
        return sum(1 for seen, path, _ in self.seen if seen == method and part in path)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path)
        with self.proxy.lock:
            self.proxy.seen.append((self.command, path, self.headers.get("Range", "")))
            rule = next((item for item in self.proxy.rules if item.takes(self.command, path)), None)
        if rule is None:
            self.forward(body)
        else:
            rule.action(self, path, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def forward(self, body: bytes, change: Callable[[bytes], bytes] = bytes, *, cut: bool = False) -> None:
        status, headers, content = self.ask(body)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(content)))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            changed = change(content)
            self.wfile.write(changed[: len(changed) // 2] if cut else changed)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def answer(self, status: int, code: str, headers: Mapping[str, str] | None = None, more: str = "") -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as asked</Message>{more}</Error>".encode()
        self.send_response_only(status)
        given = {"Date": formatdate(usegmt=True), **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(0 if self.command == "HEAD" else len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


# What may happen to a request


def says(status: int, code: str, headers: Mapping[str, str] | None = None, more: str = "") -> Action:
    """The server answers with an error."""
    return lambda handler, path, body: handler.answer(status, code, headers, more)


def resets(handler: Handler, path: str, body: bytes) -> None:
    """The connection breaks without an answer."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def cuts(handler: Handler, path: str, body: bytes) -> None:
    """The body ends after its first half."""
    handler.forward(body, cut=True)


def flips(handler: Handler, path: str, body: bytes) -> None:
    """One bit of the body is another one."""
    handler.forward(body, lambda content: content[:-1] + bytes([content[-1] ^ 1]) if content else content)


def loses_answer(handler: Handler, path: str, body: bytes) -> None:
    """The request is done, and its answer never arrives."""
    handler.ask(body)
    resets(handler, path, body)


def delays(seconds: float) -> Action:
    """The answer comes late."""

    def late(handler: Handler, path: str, body: bytes) -> None:
        time.sleep(seconds)
        with contextlib.suppress(OSError):
            handler.forward(body)

    return late


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None:
        """Clients that are killed break their connections."""


@contextlib.contextmanager
def proxy(upstream: int) -> Iterator[Proxy]:
    """A proxy in threads of this process."""
    made = Proxy(upstream)
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"proxy": made}))
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
