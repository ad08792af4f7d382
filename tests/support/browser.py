"""Real browser: Debian's Chromium without a window and without a network.

Selenium drives it through the driver of the same Debian package, so nothing is downloaded. Its
console messages and every request of a page can be read.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains

AXE = "axe-core@4.14.1"
"""Checker of accessibility faults; from npm, kept in the user's cache."""

SECONDS = 30.0


class Browser:
    """Browser window."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def open(self, url: str, *, ready: str = "return document.readyState === 'complete'") -> None:
        """Open a page and wait until the script returns a true value."""
        self.driver.get(url)
        self.wait(ready)

    def script(self, text: str, *arguments: Any) -> Any:
        """Run a script; return its result, or the result of its promise."""
        return self.driver.execute_script(text, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Return the first true result of a script."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            value = self.script(script, *arguments)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"in vain: {script}; console: {self.console()}")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other; they go to the element with the focus."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def emulate(self, **features: str) -> None:
        """Set media features, such as `prefers_color_scheme="dark"`."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def console(self) -> list[str]:
        """Return errors and warnings of the pages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses requested since the last call."""
        events = [json.loads(entry["message"]) for entry in self.driver.get_log("performance")]
        sent = [e["message"] for e in events if "requestWillBeSent" in e["message"]["method"]]
        return [e["params"]["request"]["url"] for e in sent if "request" in e["params"]]

    def pixels(self, canvas: Any) -> Any:
        """Return the pixels of a canvas, shape (height, width, 4)."""
        data = self.script("return arguments[0].toDataURL('image/png')", canvas)
        image = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))
        return np.asarray(image.convert("RGBA"))

    def faults(self) -> list[str]:
        """Return axe's serious and critical findings, each with its elements."""
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe().read_text()})
        answer = self.driver.execute_cdp_cmd(
            "Runtime.evaluate",
            {
                "expression": "axe.run().then((found) => JSON.stringify(found.violations))",
                "awaitPromise": True,
                "returnByValue": True,
            },
        )
        return [
            f"{each['id']}: {[node['html'][:150] for node in each['nodes'][:4]]}"
            for each in json.loads(answer["result"]["value"])
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Open a browser window; skips the test where there is no Chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--window-size={width},{height}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver_session = webdriver.Chrome(options=options, service=Service(driver))
    try:
        driver_session.set_script_timeout(SECONDS)
        yield Browser(driver_session)
    finally:
        driver_session.quit()


@cache
def axe() -> Path:
    """Return the script of axe, downloaded once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainctl-tests" / AXE
    script = folder / "package" / "axe.min.js"
    if not script.is_file():
        if shutil.which("npm") is None:
            pytest.skip("no npm, from which axe comes")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", AXE, "--pack-destination", folder, "--silent"]
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        subprocess.run(["tar", "xzf", packed.stdout.split()[-1]], cwd=folder, check=True)
    return script
