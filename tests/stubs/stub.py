"""The stub compiler put on PATH, IR files that tell it what to do, and the command line in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("neuronx_cc_stub.py")
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Stub:
    """A directory with a program `neuronx-cc`, the IR files of a test, and what the stub counts."""

    place: Path

    @classmethod
    def install(cls, place: Path) -> Stub:
        for name in ("bin", "ir", "count"):
            (place / name).mkdir(parents=True)
        program = place / "bin" / "neuronx-cc"
        program.write_text(f"#!{sys.executable} -IS\n{SOURCE.read_text()}")
        program.chmod(0o755)
        return cls(place)

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which the stub is the compiler; neffcache comes from this checkout."""
        return {
            **os.environ,
            "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "STUB_DIR": str(self.place / "count"),
            "NEFFCACHE_DIR": str(self.place / "store"),
        }

    def ir(self, **wishes: str) -> list[Path]:
        """One IR file a wish, named after it; one with `big` in its wish has more operations, so it starts first."""
        files = []
        for name, wish in wishes.items():
            files.append(self.place / "ir" / f"{name}.mlir")
            operations = "  %0 = stablehlo.add %a, %b\n" * (9 if "big" in wish else 1)
            files[-1].write_text(f"// stub: {wish}\nmodule @{name} {{\n{operations}}}\n")
        return files

    def calls(self) -> Counter[str]:
        """How often the stub compiled what, by the name of the IR file."""
        log = self.place / "count" / "calls"
        return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()

    def pids(self, name: str = "") -> list[int]:
        """The processes that the stub ran in, of one IR file or of all."""
        lines = [line.split() for line in (self.place / "count" / "calls").read_text().splitlines()]
        return [int(words[1]) for words in lines if name in ("", words[0])]

    def command(self, *words: str | Path) -> list[str]:
        return [sys.executable, "-m", "neffcache.cli.main", "compile", *map(str, words)]

    def run(self, *words: str | Path, environ: Mapping[str, str] | None = None, timeout: float = 300) -> Answer:
        """`neffcache compile --json WORDS` to its end."""
        done = subprocess.run(
            self.command(*words, "--json"),
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = None
        return Answer(done.returncode, document, done.stderr)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """The same in the background, with signals as a terminal gives them."""

        def signals_as_usual() -> None:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)

        return subprocess.Popen(
            self.command(*words),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=signals_as_usual,
        )


@dataclass(frozen=True)
class Answer:
    """Exit code, the JSON document on stdout, everything on stderr."""

    code: int
    document: Any
    stderr: str
