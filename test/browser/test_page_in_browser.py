"""The page of a report in a headless Chromium: `make test-browser` has the tools."""

import collections
import contextlib
import os
import pathlib
import shutil

import pytest
import torch
from torch import nn

import nc

pytest.importorskip("selenium", reason="selenium is in requirements/browser.txt: make test-browser")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = os.environ.get("NC_AXE", "")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("no Chromium: apt-get install chromium chromium-driver", allow_module_level=True)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def written(model, folder, config, profiled):
    torch.manual_seed(0)
    x = torch.randn(8, 32)
    q = nc.quantize(model.eval(), config, lambda m: m(x), example_inputs=x)
    profiled = profiled and q.engine.profile is not None
    report = q.report(profile_inputs=x if profiled else None)
    report.save(folder / "report.html")
    return folder / "report.html", report


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    model = nn.Sequential(collections.OrderedDict(blocks=blocks, head=nn.Linear(32, 4)))
    return written(model, tmp_path_factory.mktemp("small"), nc.SmoothQuantConfig(alpha=0.5), True)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A thousand operators, none of which looks like the next one."""
    layers = [nn.Linear(32, 32) if i % 3 else nn.LayerNorm(32) for i in range(1000)]
    names = {f"{'abcdefg'[i % 7]}{i}": layer for i, layer in enumerate(layers)}
    model = nn.Sequential(collections.OrderedDict(names))
    return written(model, tmp_path_factory.mktemp("large"), nc.StaticQuantConfig(), False)


@contextlib.contextmanager
def opened(path, folder, *, script=True, theme="light"):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        driver.get(pathlib.Path(path).as_uri())
        yield driver
    finally:
        driver.quit()


def shot(driver, name):
    """Keep a picture where NC_SCREENSHOTS says."""
    if folder := os.environ.get("NC_SCREENSHOTS"):
        driver.set_window_size(
            1200, driver.execute_script("return document.documentElement.scrollHeight") + 200
        )
        driver.save_screenshot(f"{folder}/{name}.png")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_error_and_no_serious_fault(small, tmp_path, theme):
    with opened(small[0], tmp_path / "user", theme=theme) as driver:
        assert driver.get_log("browser") == []
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
        back = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 22, 22)"}[theme]
        shot(driver, theme)
        if not AXE:
            pytest.skip("no axe-core: make test-browser gets it")
        driver.execute_script(pathlib.Path(AXE).read_text(encoding="utf-8"))
        found = driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        assert len(found["passes"]) > 10
        serious = [
            (v["id"], [n["html"] for n in v["nodes"]][:3])
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        assert serious == []


def names_of(table):
    return [
        row.find_element(By.CSS_SELECTOR, "td").text
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr:not([hidden])")
        if len(row.find_elements(By.CSS_SELECTOR, "td")) > 1
    ]


def table_of(driver):
    heading = driver.find_element(By.XPATH, "//h2[text()='All operators']")
    return heading.find_element(By.XPATH, "following-sibling::div[1]/table")


def test_sorting_by_mouse_and_keyboard(small, tmp_path):
    with opened(small[0], tmp_path / "user") as driver:
        table = table_of(driver)
        before = table.text
        head = table.find_element(By.CSS_SELECTOR, "th")
        button = head.find_element(By.TAG_NAME, "button")
        button.click()
        names = names_of(table)
        assert head.get_attribute("aria-sort") == "ascending"
        assert names == sorted(names)
        assert any(name.startswith("blocks.{0..2}.") for name in names)
        button.send_keys(Keys.ENTER)
        assert (head.get_attribute("aria-sort"), names_of(table)) == ("descending", names[::-1])
        button.send_keys(Keys.SPACE)
        assert (head.get_attribute("aria-sort"), table.text) == (None, before)


def test_zoom_by_click_and_by_button(small, tmp_path):
    with opened(small[0], tmp_path / "user") as driver:
        strip = driver.find_element(By.CSS_SELECTOR, ".strip")
        driver.execute_script("arguments[0].scrollIntoView()", strip)
        cells = strip.find_elements(By.TAG_NAME, "rect")
        widest = max(cells, key=lambda cell: float(cell.get_attribute("width")))
        assert times_as_wide(strip) == 1
        widest.click()
        assert times_as_wide(strip) >= 2
        cell, box = (driver.execute_script(RECTANGLE, each) for each in (widest, strip))
        assert cell["left"] < box["right"]
        assert cell["right"] > box["left"]  # it is in view
        widest.click()
        assert times_as_wide(strip) == 1
        driver.find_element(By.XPATH, "//button[text()='zoom in']").send_keys(Keys.ENTER)
        assert times_as_wide(strip) == 2
        driver.find_element(By.XPATH, "//button[text()='all']").send_keys(Keys.ENTER)
        assert times_as_wide(strip) == 1


def test_a_card_says_what_is_below_the_pointer(small, tmp_path):
    with opened(small[0], tmp_path / "user") as driver:
        card = driver.find_element(By.CSS_SELECTOR, ".hover")
        assert not card.is_displayed()
        cells = driver.find_elements(By.CSS_SELECTOR, ".strip rect")
        widest = max(cells, key=lambda cell: float(cell.get_attribute("width")))
        webdriver.ActionChains(driver).move_to_element(widest).perform()
        assert card.is_displayed()
        assert card.text.split(":")[0] in {op.operator for op in small[1].ops}
        webdriver.ActionChains(driver).move_to_element(driver.find_element(By.TAG_NAME, "h1")).perform()
        assert not card.is_displayed()


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_page(small, tmp_path, width):
    """What is wider scrolls in a box of its own, and text is never smaller than 11 px."""
    with opened(small[0], tmp_path / "user") as driver:
        given = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", given)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert driver.execute_script("return innerWidth") == width
        for table in driver.find_elements(By.CSS_SELECTOR, "table"):
            box, inner = (
                driver.execute_script(RECTANGLE, each) for each in (table.find_element(By.XPATH, ".."), table)
            )
            assert box["right"] <= width
            assert inner["left"] >= 0
            names = table.find_elements(By.CSS_SELECTOR, "td:first-child")
            assert not names or driver.execute_script(RECTANGLE, names[0])["width"] > 150
        sizes = driver.execute_script(FONT_SIZES)
        assert min(sizes) >= 11
        shot(driver, f"width-{width}")


RECTANGLE = (
    "var r = arguments[0].getBoundingClientRect();return {left: r.left, right: r.right, width: r.width}"
)
FONT_SIZES = """
return Array.from(document.querySelectorAll("main *")).filter(function (each) {
  return Array.from(each.childNodes).some(function (child) { return child.nodeType === 3 && child.data.trim(); });
}).map(function (each) { return parseFloat(getComputedStyle(each).fontSize); });
"""


def times_as_wide(strip):
    inner = strip.find_element(By.CSS_SELECTOR, ".inner")
    return round(inner.size["width"] / strip.size["width"])


def test_all_can_be_read_without_script_and_on_paper(small, tmp_path):
    with opened(small[0], tmp_path / "user", script=False) as driver:
        text = driver.find_element(By.TAG_NAME, "body").text
        assert driver.find_elements(By.TAG_NAME, "button") == []
    for words in (
        "Not int8, and why",
        "Error along the depth",
        "The worst ranges",
        "All operators",
        "Details",
    ):
        assert words in text
    assert all(op.reason in text for op in small[1].ops if "fused" not in op.reason)
    with opened(small[0], tmp_path / "paper") as driver:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        assert not driver.find_element(By.CSS_SELECTOR, ".tools").is_displayed()
        assert "All operators" in driver.find_element(By.TAG_NAME, "body").text
        assert len(driver.print_page()) > 10_000


def test_a_thousand_operators(large, tmp_path):
    path, report = large
    assert len(report.ops) == 1000
    assert path.stat().st_size < 1_000_000
    with opened(path, tmp_path / "user") as driver:
        assert driver.execute_script("return document.querySelectorAll('*').length") < 15_000
        table = table_of(driver)
        rows = "return arguments[0].tBodies[0].rows.length"
        count = driver.execute_script(rows, table)
        table.find_element(By.CSS_SELECTOR, "th button").click()
        assert driver.execute_script(rows, table) == count
        first = driver.execute_script("return arguments[0].tBodies[0].rows[0].cells[0].textContent", table)
        assert first == min(op.operator for op in report.ops)
        strip = driver.find_element(By.CSS_SELECTOR, ".strip")
        driver.execute_script(
            "arguments[0].dispatchEvent(new Event('click', {bubbles: true}))",
            strip.find_element(By.CSS_SELECTOR, "rect:nth-of-type(500)"),
        )
        assert times_as_wide(strip) > 10
        assert driver.get_log("browser") == []
