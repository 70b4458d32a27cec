"""The page at `/midstream`, in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.serve.browser import BROWSER, DRIVER, Browser
from tests.serve.conftest import ALICE
from tests.serve.process import Server

pytestmark = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="no chromium and chromedriver on this machine"
)

PHONE = 390, 844

Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    """A window as narrow as a phone, on the page."""
    made = Browser(*PHONE)
    try:
        made.open(server.url.replace("://", f"://alice:{ALICE}@") + "/midstream")
        made.until(lambda: made.text("live") == "live")
        yield made
    finally:
        made.close()


def press(browser: Browser, within: str) -> None:
    """Press the one button in a list."""
    browser.run(f"document.querySelector('#{within} button').click()")


def test_the_model_and_its_load(browser: Browser, ask: Ask) -> None:
    """The page names the model and counts what it does."""
    browser.until(lambda: browser.text("model") == "tiny")
    before = int(browser.run("return document.querySelectorAll('dd')[2].innerText"))
    body = {"model": "tiny", "prompt": "t3", "max_tokens": 5}
    assert ask("POST", "/v1/completions", json=body).is_success
    browser.until(
        lambda: int(browser.run("return document.querySelectorAll('dd')[2].innerText")) > before
    )


def test_a_running_trace_comes_and_goes(browser: Browser, ask: Ask) -> None:
    """It is listed while it runs, and can be cancelled there."""
    assert browser.text("traces") == "none"
    code = "for step in tracer.all():\n    model.model.layers[1].output[0]"
    settings = {"max_tokens": 450, "ignore_eos": True}
    body = {"prompt": "t3", "settings": settings, "code": code, "background": True}
    started = ask("POST", "/v1/midstream/traces", json=body).json()["id"]
    browser.until(lambda: "a block sent as text" in browser.text("traces"))
    press(browser, "traces")
    browser.until(lambda: browser.text("traces") == "none")
    assert ask("GET", f"/v1/midstream/traces/{started}").status_code == 404


def test_an_edit_is_listed_and_cleared(browser: Browser, ask: Ask) -> None:
    """A name is shown as text, whatever it is made of."""
    name = "<img src=x onerror=alert(1)>"
    ask("POST", "/v1/midstream/edits", json={"name": name, "code": "pass"})
    browser.until(lambda: name in browser.text("edits"))
    assert browser.run("return document.querySelectorAll('img').length") == 0
    press(browser, "edits")
    browser.until(lambda: browser.text("edits") == "none")
    assert ask("GET", "/v1/midstream/edits").json() == {"edits": []}


def test_an_error_is_shown(browser: Browser, ask: Ask) -> None:
    """What went wrong in a block of the key's, and when."""
    body = {"prompt": "t3", "settings": {"max_tokens": 1}, "code": "raise ValueError('seen')"}
    assert ask("POST", "/v1/midstream/traces", json=body).is_success
    browser.until(lambda: "ValueError: seen" in browser.text("errors"))


def test_it_fits_a_phone(browser: Browser) -> None:
    """Nothing is wider than the window, and buttons are large enough for a finger."""
    width = browser.run("return document.documentElement.scrollWidth")
    assert width <= browser.run("return window.innerWidth")
    assert browser.run("return parseFloat(getComputedStyle(document.body).fontSize)") >= 16
