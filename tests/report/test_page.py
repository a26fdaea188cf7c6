"""The page of a report in headless Chromium: it opens from a file, filters, sorts, explains, and fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerzero.report.compare import compare_reports
from layerzero.report.page import page_of_comparison, page_of_report, write_page
from layerzero.spec.errors import ConfigurationError
from tests.browser import axe_script, headless_chromium, show_as
from tests.report.documents import call_map, document, measured

WIDTHS = (390, 1400)
EVIL = '</script><img src=x onerror="window.ran=1">&lt;b&gt;\u2028\'"`${1}<!--<script>'
AXE = """
const done = arguments[arguments.length - 1];
axe.run().then(result => done(result.violations), error => done([{id: String(error)}]));
"""
PARTS = ("overview", "maps", "drift", "traffic", "health", "timeline", "ranks", "machine", "ledger")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, one for this file."""
    with headless_chromium() as chrome:
        yield chrome


def opened(browser: Any, path: Path, page: bytes, width: int = 1400) -> None:
    """Open a page from its file, on a screen of this width."""
    write_page(path, page)
    show_as(browser, width)
    browser.get_log("browser")
    browser.get(path.as_uri())


def rows(browser: Any, table: str) -> list[list[str]]:
    """The cells of the shown rows of a table, without what only a screen reader says."""
    script = """
    const seen = node => node.className !== 'hidden-text';
    const own = cell => [...cell.childNodes].filter(seen).map(node => node.textContent).join('');
    const body = document.querySelector(`table[aria-label="${arguments[0]}"] > tbody`);
    return [...body.rows].filter(row => row.className !== 'why').map(row => [...row.cells].map(own));
    """
    found: list[list[str]] = browser.execute_script(script, table)
    return found


def keys(browser: Any, selector: str, text: str) -> None:
    """Type into an element."""
    browser.find_element("css selector", selector).send_keys(text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_the_screen_and_says_no_error(browser: Any, tmp_path: Path, width: int, theme: str) -> None:
    """At a phone's width and a desktop's nothing sticks out, in both themes; screenshots are kept."""
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    report = document(drift=msgspec.to_builtins(compare_plain()))
    opened(browser, tmp_path / "report.html", page_of_report(report), width)
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    shots = Path(os.environ.get("LZ_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(shots / f"report-{width}-{theme}.png"))
    assert wide == 0
    assert (colour == "rgb(20, 23, 28)") is (theme == "dark")
    assert [each.get_attribute("id") for each in browser.find_elements("css selector", "section")] == list(
        PARTS
    )
    assert browser.get_log("browser") == []


def compare_plain() -> Any:
    """What `document()` differs in from a slower machine, as a report keeps it."""
    from layerzero.report.collect import as_plain

    slower = call_map(measured("float32 C=512 N=1", 9.0, 2.0, 0.5, chosen=1))
    return as_plain(compare_reports(document(maps=(slower,), facts={"torch": "2.12.0"}), document()))


def test_rows_are_filtered_sorted_and_opened(browser: Any, tmp_path: Path) -> None:
    """Words filter, a header sorts by number and turns round, a row opens who takes the call and why."""
    opened(browser, tmp_path / "report.html", page_of_report(document()))
    table = "calls of rms_norm"
    assert len(rows(browser, table)) == 12
    head = f'table[aria-label="{table}"] th:nth-child(4)'
    browser.find_element("css selector", head + " button").click()
    values = [float(row[3]) for row in rows(browser, table)]
    assert values == sorted(values, reverse=True) and len(set(values)) == 5
    assert browser.find_element("css selector", head).get_attribute("aria-sort") == "descending"
    browser.find_element("css selector", head + " button").click()
    assert [float(row[3]) for row in rows(browser, table)] == values[::-1]
    keys(browser, '#maps input[type="search"]', "n=12")
    assert [row[0] for row in rows(browser, table)] == ["float32 C=512 N=12"]
    # Taken is b.norm, which 8 < N make faster; the third kernel is faster, and refuses.
    assert rows(browser, table)[0][3:] == ["1.25", "1.00", "0.25 no"]
    button = browser.find_element("css selector", "#maps tr.opens td button")
    button.send_keys("\n")  # by keyboard
    assert button.get_attribute("aria-expanded") == "true"
    explained = rows(browser, "verdicts")
    assert explained[0][:2] == ["b.norm (taken)", "takes it: by measured"]
    assert explained[-1][:2] == ["c.norm", "refuses: SM_TOO_OLD: sm needs >= 90, got 80"]
    button.click()
    assert browser.find_elements("css selector", "tr.why") == []
    from selenium.webdriver.support.ui import Select

    Select(browser.find_elements("css selector", "#maps select")[1]).select_by_visible_text("rope")
    assert [row[0] for row in rows(browser, "calls of rope")] == ["float32 N=1"]
    assert browser.get_log("browser") == []


def test_the_theme_is_switched(browser: Any, tmp_path: Path) -> None:
    """The button turns the page's theme and says which is on."""
    opened(browser, tmp_path / "report.html", page_of_report(document()))
    button = browser.find_element("css selector", "#theme")
    before, looks = button.get_attribute("aria-pressed"), []
    for _ in range(2):
        looks.append((button.get_attribute("aria-pressed"), button.value_of_css_property("border-top-width")))
        button.click()
    assert len(set(looks)) == 2 and len({width for _, width in looks}) == 2, "seen, too"
    button.click()
    assert button.get_attribute("aria-pressed") != before
    assert browser.execute_script("return document.documentElement.dataset.theme") in ("light", "dark")


def test_text_of_others_never_becomes_markup(browser: Any, tmp_path: Path) -> None:
    """A kernel, a call, an error, a label, a fact and a requirement that are markup are shown as they are."""
    plain = msgspec.to_builtins(document(drift=compare_plain()))

    def spoiled(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            return value if key in ("kind", "state", "op", "launch") else value + EVIL
        if isinstance(value, dict):
            return {name: spoiled(each, name) for name, each in value.items()}
        return [spoiled(each) for each in value] if isinstance(value, list | tuple) else value

    report = msgspec.convert(spoiled(plain), type(document()))
    page = page_of_report(report)
    assert page.count(b"</script>") == 2 and b'onerror="' not in page
    opened(browser, tmp_path / "report.html", page)
    browser.execute_script("document.querySelectorAll('tr.opens').forEach(row => row.click())")
    texts = browser.execute_script("return document.body.textContent")
    assert texts.count(EVIL) > 100
    assert browser.execute_script("return window.ran ?? null") is None
    assert browser.execute_script("return [document.images.length, document.scripts.length]") == [0, 2]
    assert browser.get_log("browser") == []


def test_the_page_runs_nothing_but_its_own_script(browser: Any, tmp_path: Path) -> None:
    """Even where markup were written into the page, its policy runs none of it and loads nothing."""
    opened(browser, tmp_path / "report.html", page_of_report(document()))
    browser.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran=1\">')"
    )
    browser.execute_script(
        "const s = document.createElement('script'); s.text = 'window.ran=2'; document.body.append(s)"
    )
    assert browser.execute_script("return window.ran ?? null") is None
    log = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "Content Security Policy" in log


def test_axe_finds_nothing_serious(browser: Any, tmp_path: Path) -> None:
    """The rules of axe-core, over the page with a row opened: no violation that is serious or critical."""
    script = axe_script().read_text()
    browser.execute_cdp_cmd("Page.enable", {})
    browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        for theme in ("light", "dark"):
            opened(browser, tmp_path / "report.html", page_of_report(document(drift=compare_plain())))
            browser.execute_script("document.querySelector('tr.opens').click()")
            browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
            browser.execute_script(script)
            found = browser.execute_async_script(AXE)
            bad = [
                (v["id"], [n["html"] for n in v["nodes"]])
                for v in found
                if v.get("impact") not in ("minor", "moderate")
            ]
            assert bad == []
    finally:
        browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})


def test_an_empty_report_says_what_is_missing_in_each_part(browser: Any, tmp_path: Path) -> None:
    """Without measurements, trace, ranks, ledger: each part says what would fill it, and nothing fails."""
    empty = document(
        maps=(call_map(),), traffic=(), health=(), timeline=None, ranks=(), ledger=(), missing=(), notes=(),
        machine=(),
    )  # fmt: skip
    opened(browser, tmp_path / "report.html", page_of_report(empty))
    for part, words in {
        "maps": "Nothing was measured on this machine: lz tune", "drift": "--since", "traffic": "--trace",
        "health": "No kernel has failed", "timeline": "lz trace run", "ranks": "--rank", "ledger": "--ledger",
        "machine": "Every optional library works",
    }.items():  # fmt: skip
        assert words in browser.find_element("css selector", f"#{part}").text
    assert browser.get_log("browser") == []


def test_a_comparison_is_a_page_too(browser: Any, tmp_path: Path) -> None:
    """What differs between two reports: facts, choices with why, times."""
    slower = call_map(measured("float32 C=512 N=1", 9.0, 2.0, 0.5, chosen=1))
    comparison = compare_reports(document(), document(maps=(slower,), facts={"torch": "2.12.0"}))
    opened(browser, tmp_path / "compared.html", page_of_comparison(comparison))
    text = browser.find_element("css selector", "#compared").text
    assert "a.norm" in text and "2.12.0" in text and "8.00" in text
    assert browser.get_log("browser") == []


def test_a_file_that_is_no_page_is_not_replaced(tmp_path: Path) -> None:
    """A page may replace a page or an empty file, nothing else; it is written whole."""
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(ConfigurationError, match=r"notes\.txt: not replaced"):
        write_page(path, page_of_report(document()))
    assert path.read_text() == "my notes"
    with pytest.raises(ConfigurationError, match="not replaced"):
        write_page(tmp_path, b"")
    path.write_text("")
    for _ in range(2):
        write_page(path, page_of_report(document()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]
