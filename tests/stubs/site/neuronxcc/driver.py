"""Part of the stub compiler: what `bin/neuronx-cc` does."""

from __future__ import annotations

import hashlib
import os
import sys
import time

VERSION = "2.33.1.0+5f1ab000"


def main(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"NeuronX Compiler version {VERSION}\n\nPython version 3.11.0")
        return 0
    if arguments[:1] != ["compile"]:
        print("usage: neuronx-cc compile FILE --output FILE ...", file=sys.stderr)
        return 2
    if log := os.environ.get("STUB_COMPILE_LOG"):
        with open(log, "a") as file:
            file.write(" ".join(arguments) + "\n")
    time.sleep(float(os.environ.get("STUB_COMPILE_SECONDS", "0")))
    if code := os.environ.get("STUB_COMPILE_FAILS"):
        print(f"ERROR: [{code}] this stub was told to refuse", file=sys.stderr)
        return 1
    words = iter(arguments[2:])
    output = ""
    given: list[str] = []
    for word in words:
        if word == "--output":
            output = next(words)
        else:
            given.append(word)
    with open(arguments[1], "rb") as file:
        ir = file.read()
    digest = hashlib.sha256(ir + "\0".join(given).encode()).hexdigest()
    # Side files with fixed names, as the compiler writes them into its working directory.
    with open("all_metrics.csv", "w") as file:
        file.write("stub\n")
    with open(output, "wb") as file:
        file.write(f"STUB NEFF, runs nowhere {digest}\n".encode() * 8)
    return 0
