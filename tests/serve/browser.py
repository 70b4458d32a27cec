"""Headless Chromium, driven through its own WebDriver server."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.serve.process import free_port

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


class Browser:
    """One window.

    Args:
        width, height: of the window, in pixels.
    """

    def __init__(self, width: int, height: int):
        assert DRIVER is not None
        port = free_port()
        self._process = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        options = {"binary": BROWSER, "args": [*_FLAGS, f"--window-size={width},{height}"]}
        asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self.until(lambda: self._is_up())
        made = self._http.post("/session", json=asked).json()["value"]
        self._session = f"/session/{made['sessionId']}"

    def _is_up(self) -> bool:
        try:
            return bool(self._http.get("/status").json()["value"]["ready"])
        except httpx.HTTPError:
            return False

    def until(self, true: Callable[[], Any], seconds: float = 30.0) -> Any:
        """Wait until something is true; what it is.

        Raises:
            AssertionError: it does not become so.
        """
        deadline = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < deadline, "it did not become true"
            time.sleep(0.1)
        return found

    def open(self, address: str) -> None:
        """Go to an address."""
        self._ask("/url", {"url": address})

    def run(self, script: str) -> Any:
        """What a script returns in the page."""
        return self._ask("/execute/sync", {"script": script, "args": []})

    def text(self, name: str) -> str:
        """The text of the element of an id."""
        return str(self.run(f"return document.getElementById({name!r}).innerText"))

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        shown = self._http.get(f"{self._session}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(shown))

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        reply = self._http.post(self._session + path, json=body)
        assert reply.is_success, reply.text
        return reply.json()["value"]

    def close(self) -> None:
        """End it and its server."""
        try:
            self._http.delete(self._session)
        finally:
            self._process.terminate()
            self._process.wait(30)
            self._http.close()
