"""Which command lines count as compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

from neffcache.runtime.processes import is_compile

pytestmark = pytest.mark.fast

COMPILES = [
    ["g++", "a.cpp", "-shared", "-o", "a.so"],
    ["/usr/bin/g++", "-c", "a.cpp"],
    ["x86_64-linux-gnu-g++-12", "a.cpp"],
    ["clang++", "-v", "-c", "a.cpp"],
    ["ld", "-o", "a.so", "a.o"],
    ["neuronx-cc", "compile", "a.hlo", "--target", "trn2", "--output", "a.neff"],
    ["ccache", "g++", "-c", "a.cpp"],
    ["env", "LC_ALL=C", "g++", "-c", "a.cpp"],
    ["sh", "-c", "g++ -c a.cpp"],
    ["nvcc", "a.cu"],
    ["ninja", "-v"],
    ["make", "-j2"],
    ["nice", "-n", "10", "g++", "-c", "a.cpp"],
    ["bash", "-c", "cd build && g++ -c a.cpp"],
    ["bash", "-c", "CXX=g++ g++ -c a.cpp; true"],
    ["timeout", "60", "bash", "-c", "make all"],
]
NOT = [
    ["g++", "--version"],
    ["g++", "-v"],
    ["g++"],
    ["gcc", "-dumpversion"],
    ["g++", "-print-prog-name=cc1plus"],
    ["g++", "-E", "-P", "header.h", "-o", "out.i"],
    ["g++", "-march=native", "-E", "-v", "-x", "c++", "/dev/null"],
    ["neuronx-cc", "--version"],
    ["python", "-c", "pass"],
    ["lscpu"],
    ["sh", "-c", "echo g++"],
    ["bash", "-c", "cd build && g++ --version"],
    ["ninja", "--version"],
    ["nice", "-n", "10", "ls"],
    [],
]


@pytest.mark.parametrize("words", COMPILES, ids=" ".join)
def test_is_a_compile(words: list[str]) -> None:
    assert is_compile(words)


@pytest.mark.parametrize("words", NOT, ids=" ".join)
def test_is_no_compile(words: list[str]) -> None:
    assert not is_compile(words)


PROGRAM = """
import os, subprocess, sys
from neffcache.runtime.processes import watch

seen = []
watch(lambda words, compiles: seen.append((os.path.basename(words[0]), compiles)))
subprocess.run(["g++", "--version"], stdout=subprocess.DEVNULL)
subprocess.run(["g++", "-c", "-x", "c++", "-o", os.devnull, "-"], input=b"int x;")
subprocess.run("g++ -c -x c++ -o /dev/null /dev/null", shell=True)
os.system("g++ -c -x c++ -o /dev/null /dev/null")
subprocess.run(["harmless", "-c", "-x", "c++", "-o", "/dev/null", "/dev/null"], executable="g++")
pid = os.posix_spawnp("g++", ["g++", "-c", "-x", "c++", "-o", "/dev/null", "/dev/null"], os.environ)
os.waitpid(pid, 0)
print(sum(compiles for _, compiles in seen), len(seen))
"""


def test_every_way_to_start_a_compiler_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "6"], done
