"""A real browser: Chromium without a window, driven by the W3C WebDriver protocol that chromedriver speaks."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name for one
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--window-size=1100,900"]
LONG_S = 90.0


def is_installed() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


class Browser:
    """One page of one browser."""

    def __init__(self, folder: Path) -> None:
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise AssertionError("chromedriver did not start")
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=LONG_S)
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._at = f"/session/{self._send('POST', '/session', wanted)['sessionId']}"

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.delete(self._at)
        self._client.close()
        self._driver.terminate()
        self._driver.wait(LONG_S)
        assert self._driver.stdout is not None
        self._driver.stdout.close()

    def open(self, address: str) -> None:
        self._send("POST", f"{self._at}/url", {"url": address})

    def click(self, selector: str) -> None:
        self._send("POST", f"{self._find(selector)}/click", {})

    def type(self, selector: str, text: str, *, instead: bool = True) -> None:
        if instead:
            self._send("POST", f"{self._find(selector)}/clear", {})
        self._send("POST", f"{self._find(selector)}/value", {"text": text})

    def choose(self, selector: str, path: Path) -> None:
        """Gives a file to an input, as the dialog would."""
        self._send("POST", f"{self._find(selector)}/value", {"text": str(path)})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._send("POST", f"{self._at}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Returns the text of what is there now; none, if nothing is there yet."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def wait_for(self, words: str, selector: str = "body") -> None:
        end = time.monotonic() + LONG_S
        while words not in self.text(selector):
            assert time.monotonic() < end, self.text("body")
            time.sleep(0.05)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", f"{self._at}/screenshot")))

    def _find(self, selector: str) -> str:
        found = self._send("POST", f"{self._at}/element", {"using": "css selector", "value": selector})
        return f"{self._at}/element/{found[ELEMENT]}"

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer
