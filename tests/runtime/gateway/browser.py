"""A real browser for tests: Chromium, driven over the W3C WebDriver protocol by its chromedriver. None is installed: tests skip."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.gateway.server import listen

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, f"/session/{self._session}{path}", json=body)
        said = answer.json()["value"]
        assert answer.status_code == 200, said
        return said

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        """The page's own size: a headless window may not be made as narrow as a telephone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def prefers(self, scheme: str) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the function body `script` returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def click(self, selector: str) -> None:
        element = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        (number,) = element.values()
        self._ask("POST", f"/element/{number}/click", {})

    def type(self, selector: str, text: str) -> None:
        (number,) = self._ask("POST", "/element", {"using": "css selector", "value": selector}).values()
        self._ask("POST", f"/element/{number}/value", {"text": text})

    def logs(self) -> list[str]:
        """What the browser complained of since it was last asked: errors of scripts, files that were blocked or missing."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def wait(self, holds: Callable[[], Any], what: str, within_s: float = 60.0) -> Any:
        end_s = time.monotonic() + within_s
        while not (found := holds()):
            assert time.monotonic() < end_s, f"{what}; the page says: {self.text('body')[:2000]}"
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """folder: for its profile, fresh."""
    chromium, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with chromedriver is installed (Debian: apt-get install chromium chromium-driver)")
    with listen("127.0.0.1", 0) as socket:
        port = socket.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as client:
            end_s = time.monotonic() + 60.0
            while True:
                try:
                    if client.get("/status").json()["value"]["ready"]:
                        break
                except httpx.TransportError:
                    assert time.monotonic() < end_s and process.poll() is None, "chromedriver does not answer"
                time.sleep(0.05)
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={folder}"]}
            wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
            said = client.post("/session", json={"capabilities": wanted}).json()["value"]
            assert "sessionId" in said, said
            try:
                yield Browser(client, said["sessionId"])
            finally:
                client.delete(f"/session/{said['sessionId']}")
    finally:
        process.terminate()
        process.wait(60.0)
