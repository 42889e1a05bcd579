"""The documentation: what is read off the code is not stale, the site builds without a warning and can be browsed."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from neffcache.cli.main import VERBS
from neffcache.errors import NeffcacheError
from neffcache.flows.settings import KNOWN
from scripts import reference
from tests import browser

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.fast
@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_what_is_read_off_the_code_is_not_stale(path: Path) -> None:
    text = path.read_text()
    assert reference.renewed(text) == text, "scripts/docs reference writes it again"


@pytest.mark.fast
def test_every_generated_part_has_a_page() -> None:
    named = re.findall(r"<!-- generated: ([\w-]+) -->", "".join(path.read_text() for path in reference.pages()))
    assert sorted(named) == sorted(reference.BLOCKS)


@pytest.mark.fast
def test_the_parts_hold_what_there_is() -> None:
    assert re.findall(r"^## (\w+)$", reference.commands(), re.MULTILINE) == list(VERBS)
    assert all(f"`{name}`" in reference.settings() for name in [*KNOWN, *KNOWN.values()])
    assert all(f"`{kind.__name__}` | {kind.exit_code} |" in reference.error_classes()
               for kind in NeffcacheError.__subclasses__())  # fmt: skip


@pytest.mark.fast
def test_a_change_of_the_code_makes_a_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    monkeypatch.setitem(KNOWN, "something_new", "NEFFCACHE_SOMETHING_NEW")
    assert "`NEFFCACHE_SOMETHING_NEW`" in reference.renewed(text)


@pytest.mark.fast
def test_what_is_markdown_in_a_docstring_is_shown_as_it_is() -> None:
    assert reference.plain("a <b> of `x_y`\n  and __c__\n\n* d") == "a &lt;b> of `x_y` and \\_\\_c\\_\\_\n\n\\* d"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: scripts/setup does it")
    place = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [ROOT / "scripts" / "docs", "build", place],
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return place


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.mark.integration
def test_the_site_has_every_page_and_names_no_other_host(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        inside = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / inside / "index.html").is_file() or inside.name == "index", page
    locations = {entry["location"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]}
    assert "reference/options/#doctor" in locations
    fetched = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//", re.IGNORECASE)
    assert [page for page in site.rglob("*.html") if fetched.search(page.read_text())] == []


@pytest.mark.integration
def test_a_strict_build_refuses_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: scripts/setup does it")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[nowhere](index.md#no-such-part)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no-such-part" in done.stderr


@pytest.mark.integration
def test_a_browser_goes_through_the_site(address: str, tmp_path: Path) -> None:
    if browser.PROGRAM is None:
        pytest.skip(browser.ABSENT)
    with browser.page(tmp_path / "profile") as page:
        page.open(address)
        assert page.evaluate("document.querySelector('article h1').textContent").startswith("neffcache")
        page.evaluate("document.querySelector('nav a[href*=\"reference/exit-codes\"]').click()")
        page.until("location.pathname === '/reference/exit-codes/' && document.readyState === 'complete'")
        codes = "[...document.querySelectorAll('article table tbody tr td:first-child')].map(cell => cell.textContent)"
        assert page.evaluate(codes) == [*map(str, range(10)), "130", "143"]
        # The search: its worker and its index, as a reader uses them.
        page.evaluate(
            "(() => { const box = document.querySelector('[data-md-component=search-query]');"
            " box.focus(); box.value = 'quarantine'; box.dispatchEvent(new Event('input', {bubbles: true}));"
            " box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
        )
        page.until("document.querySelector('[data-md-component=search-result] a[href*=\"files\"]') !== null")
        assert page.complaints == []
        assert any(url.endswith("search/search_index.json") for url in page.requests)
        assert [url for url in page.requests if not url.startswith((address, "data:", "blob:", "about:"))] == []
