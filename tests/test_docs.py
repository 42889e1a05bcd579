"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"


def named_tests() -> list[tuple[str, str]]:
    text = "".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))
    return sorted(set(re.findall(r"`(?:tests/)?([\w/]+\.py)::(test_\w+)`", text)))


def test_there_are_some() -> None:
    assert len(named_tests()) > 20


@pytest.mark.parametrize(("file", "name"), named_tests(), ids=lambda part: part)
def test_a_test_that_the_documentation_names_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file} has no {name}"
