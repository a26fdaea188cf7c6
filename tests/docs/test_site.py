"""The site builds without a warning, and a browser can use it: links, search, pages as wide as the window."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from filelock import FileLock

from tests import children
from tests.browser import headless_chromium, show_as

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 280
# Its trees live as long as the build, so that the collector finds nothing, again and again.
SPHINX = """
import gc, sys
gc.disable()
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
WIDTHS = (390, 1400)
PAGES = ("index.html", "guide/first_service.html", "reference/settings.html", "reference/api.html",
         "reference/backends.html", "design/architecture.html", "performance.html")  # fmt: skip

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None,
        reason="sphinx or furo is not installed: pip install 'layerzero-runtime[docs]'",
    ),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, one for all of xdist's workers; a warning of Sphinx's fails the build."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    html = folder / "site"
    with FileLock(folder / "site.lock"):
        if not (html / "built").exists():
            build(html, folder / "trees")
            (html / "built").touch()
    return html


def build(html: Path, trees: Path) -> None:
    """Build as `make docs` does."""
    words = ("-b", "html", "-W", "--keep-going", "-q")
    folders = ("-d", str(trees), str(ROOT / "docs"), str(html))
    done = children.run(SPHINX, *words, *folders, folder=html.parent, timeout=BUILD_S)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """The site behind HTTP, since a browser's search does not run from files."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, one for all tests."""
    with headless_chromium() as chrome:
        yield chrome


class Page(HTMLParser):
    """The links, sources and ids of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag points at and what it may be pointed at by."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)


def test_every_internal_link_leads_to_a_page_and_a_heading(site: Path) -> None:
    """A link of the built site to a file or an anchor that is not there is named with its page."""
    pages = {p.relative_to(site).as_posix(): Page(p.read_text()) for p in site.rglob("*.html")}
    assert set(PAGES) <= set(pages)
    broken = []
    for name, page in pages.items():
        for target in page.targets:
            url, anchor = urldefrag(target)
            if ":" in url or url.startswith("//"):
                continue
            place = unquote(urljoin(f"/{name}", url)).lstrip("/").partition("?")[0] if url else name
            place += "index.html" if place.endswith("/") or not place else ""
            if not (site / place).is_file():
                broken.append(f"{name}: {target}")
            elif anchor and place in pages and unquote(anchor) not in pages[place].ids:
                broken.append(f"{name}: no anchor {target}")
    assert broken == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(address: str, browser: Any, width: int, tmp_path: Path) -> None:
    """At a phone's width and at a desktop's every page fits; a screenshot of each is kept."""
    shots = Path(os.environ.get("LZ_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    show_as(browser, width)
    wide = {}
    for page in PAGES:
        browser.get(address + page)
        assert browser.execute_script("return window.innerWidth") == width
        # The theme lets its columns scroll, too: none of them may need to.
        over = browser.execute_script(
            "return [...document.querySelectorAll('html, body, .page, .main, .content')]"
            ".map(e => e.scrollWidth - e.clientWidth)"
        )
        if max(over) > 0:
            wide[page] = over
        shot = shots / f"{page.replace('/', '_').removesuffix('.html')}-{width}.png"
        assert browser.save_screenshot(str(shot))
        assert shot.stat().st_size > 10_000
    assert wide == {}


@pytest.mark.parametrize(
    ("words", "page"), [("PLATFORM_MISMATCH", "reference/reasons"), ("rope", "reference/")]
)
def test_search_finds_a_page(address: str, browser: Any, words: str, page: str) -> None:
    """The search box of the built site answers with a link to the page that has the words."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}search.html?q={words}")
    links = WebDriverWait(browser, 60).until(
        lambda b: b.execute_script(
            "return [...document.querySelectorAll('#search-results li a')].map(a => a.href)"
        )
    )
    assert any(page in link for link in links), links


def test_pictures_follow_the_theme(address: str, browser: Any) -> None:
    """Of the two pictures of the front page exactly that of the theme in force is shown."""
    browser.get(address + "index.html")
    for theme in ("light", "dark"):
        browser.execute_script(f"document.body.dataset.theme = '{theme}'")
        visible = browser.execute_script(
            "return [...document.querySelectorAll('article img')].filter(i => i.offsetParent).map(i => i.src)"
        )
        assert [name.rpartition("-")[2] for name in visible] == [f"{theme}.svg"] * len(visible)
        assert visible
