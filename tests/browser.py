"""A headless Chromium for the tests that look at pages."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
AXE_PACKAGES = ("axe_playwright_python", "axe_selenium_python")  # the first one has the newer rules


@contextmanager
def headless_chromium() -> Iterator[Any]:
    """Chromium, driven by the chromedriver beside it; the test is skipped where one of them is missing."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with a chromedriver here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: the docs extra")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    chrome.set_page_load_timeout(120)
    try:
        yield chrome
    finally:
        chrome.quit()


def show_as(browser: Any, width: int, height: int = 900) -> None:
    """Give the page a screen of this size: a window of Chromium's is never narrower than 500."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def axe_script() -> Path:
    """Axe-core's script out of a package that has it; the test is skipped where none is installed."""
    for package in AXE_PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in Path(folder).rglob("axe.min.js"):
                return path
    pytest.skip(f"axe-core is not installed: pip install --no-deps {AXE_PACKAGES[0].replace('_', '-')}")
