"""The site of the documentation in a headless Chromium: `make test-site` builds it and has the tools."""

import functools
import http.server
import os
import pathlib
import re
import shutil
import threading
import urllib.parse
import urllib.request

import pytest

pytest.importorskip("selenium", reason="selenium is in requirements/browser.txt: make test-site")
from selenium import webdriver
from selenium.webdriver.common.by import By

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SITE = os.environ.get("NC_SITE", "")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("no Chromium: apt-get install chromium chromium-driver", allow_module_level=True)
if not SITE:
    pytest.skip("NC_SITE names no site: make test-site", allow_module_level=True)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        version = max(path.name for path in pathlib.Path(SITE).iterdir() if path.is_dir())
        yield f"http://127.0.0.1:{server.server_port}/{version}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def links(address, page):
    """Addresses on this site that a page links to, without their anchors."""
    with urllib.request.urlopen(page) as answer:
        text = answer.read().decode()
    found = (urllib.parse.urljoin(page, target) for target in re.findall(r'(?:href|src)="([^"]+)"', text))
    return {
        urllib.parse.urldefrag(target)[0] for target in found if target.startswith(address.rpartition("/")[0])
    }


def test_every_link_of_the_site_reaches_something(address):
    seen, waiting = set(), {f"{address}/index.html"}
    while waiting:
        page = waiting.pop()
        seen.add(page)
        if page.endswith(".html"):
            waiting |= links(address, page) - seen
        else:
            with urllib.request.urlopen(page) as answer:
                assert answer.status == 200
    pages = {page for page in seen if page.endswith(".html") and "/docs/" in page}
    assert len(pages) > 45, sorted(pages)


@pytest.mark.parametrize(
    "page", ["index", "docs/how-to/quantize-an-llm", "docs/tutorials/encoder", "docs/results/speed"]
)
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_the_screen(browser, address, page, width):
    browser.set_window_size(width, 900)
    browser.get(f"{address}/{page}.html")
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    said = (line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE")
    assert [line for line in said if "favicon.ico" not in line] == []


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("encoder", r"products run in int8"),
        ("cnn", r"channels scaled\s+\d+\.\d dB"),
        ("language-model", r"KL divergence 0\.\d+ nats"),
    ],
)
def test_tutorials_show_what_they_printed(browser, address, page, said):
    browser.get(f"{address}/docs/tutorials/{page}.html")
    cells = browser.find_elements(By.CSS_SELECTOR, ".cell_output")
    pages = browser.find_elements(By.CSS_SELECTOR, ".cell_output iframe")  # a report is a page of its own
    outputs = "\n".join(
        [*(cell.text for cell in cells), *(str(page.get_attribute("srcdoc")) for page in pages)]
    )
    assert re.search(said, outputs), outputs
    assert "site-packages" not in outputs  # a warning that names a file of the building machine


def test_search_finds_a_page(browser, address):
    browser.get(f"{address}/search.html?q=SmoothQuantConfig")
    browser.implicitly_wait(20)
    found = [link.get_attribute("href") for link in browser.find_elements(By.CSS_SELECTOR, "ul.search li a")]
    assert any("reference/configurations" in target for target in found), found


def test_the_menu_has_all_versions(browser, address):
    browser.set_window_size(1280, 900)
    browser.get(f"{address}/index.html")
    browser.get(browser.find_element(By.LINK_TEXT, "All versions").get_attribute("href"))
    assert "Documentation of nc" in browser.page_source
