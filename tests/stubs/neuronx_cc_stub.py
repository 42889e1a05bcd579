"""A stub compiler: it stands where `neuronx-cc` stands on PATH and compiles nothing.

It writes bytes derived from its input behind a NEFF's header, and does what a line `// stub: WISH` of the IR file says.
It can prove how we handle a compiler process, never that a NEFF works. Only the standard library, run with `-IS`.

STUB_DIR in the environment is where it counts: `calls` gets a line a compile, `tried-NAME` remembers a first try.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

VERSION = "2.99.0.0+stub"


def main(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"NeuronX Compiler version {os.environ.get('STUB_VERSION', VERSION)}")
        return 0
    assert words[0] == "compile", words
    source, output = Path(words[1]), Path(words[words.index("--output") + 1])
    data = source.read_bytes()
    wish, *arguments = wishes(data)
    note(data, " ".join(words[2:]))
    # Side files with fixed names, as the real one leaves them: two compiles in one directory would meet.
    Path("global_metric_store.json").write_text("x")
    if Path("command.txt").exists():
        print("ERROR: another compile works in this directory")
        return 1
    Path("command.txt").write_text(" ".join(words))
    print(f"stub compiler {VERSION}: {wish} {' '.join(arguments)}")
    return act(wish, arguments, data, output, words)


def act(wish: str, arguments: list[str], data: bytes, output: Path, words: list[str]) -> int:
    if wish == "refuse":
        print(f"WARNING: something by the way\nERROR: [{arguments[0]}] the stub does not like this graph")
        print("ERROR: and therefore something else went wrong too")
        return 70
    if wish == "status":
        print("ERROR: gave up")
        return int(arguments[0])
    if wish == "flaky" and first(data, int(arguments[0]) if arguments else 1):
        print("ERROR: Backend exited with code 70")
        return 70
    if wish == "killed" or (wish == "killed-once" and first(data)):
        os.kill(os.getpid(), signal.SIGKILL)
    if wish == "say":
        print(" ".join(arguments))
        return 1
    if wish == "hang":
        # With a child in a session of its own, which no signal to a group reaches.
        subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
    if wish == "sleep":
        time.sleep(float(arguments[0]))
    if wish == "burn":
        while time.process_time() < float(arguments[0]):
            pass
    if wish == "missing":
        return 0
    if wish == "empty" or (wish == "empty-once" and first(data)):
        output.write_bytes(b"")
        return 0
    body = hashlib.sha256(data + b"\0".join(word.encode() for word in words[2 : words.index("--output")])).digest() * 64
    header = b"".join(number.to_bytes(8, "little") for number in (2, 1024, len(body))).ljust(1024, b"\0")
    whole = header + body
    output.write_bytes(whole[: len(whole) // 2] if wish == "cut" else whole)
    return 0


def wishes(data: bytes) -> list[str]:
    for line in data.decode(errors="replace").splitlines():
        if line.startswith("// stub: "):
            return line.removeprefix("// stub: ").split()
    return ["good"]


def note(data: bytes, words: str) -> None:
    """One line a compile: which, whose process, with what."""
    if "STUB_DIR" in os.environ:
        name = re.search(rb"module @(\w+)", data)
        line = f"{name[1].decode() if name else '?'} {os.getpid()} {time.monotonic():.3f} {words}\n"
        descriptor = os.open(Path(os.environ["STUB_DIR"], "calls"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def first(data: bytes, times: int = 1) -> bool:
    """Whether this is one of the first `times` tries at this input."""
    for number in range(times):
        mark = Path(os.environ["STUB_DIR"], f"tried-{hashlib.sha256(data).hexdigest()[:16]}-{number}")
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
