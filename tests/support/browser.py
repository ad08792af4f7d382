"""A real browser: Debian's Chromium without a window, and without a network.

It is driven by Selenium over the driver of the same Debian package, so nothing is downloaded. What
it writes to its console, and every request that a page makes, can be read.
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
"""Finds faults of accessibility; from npm, kept in the user's cache."""

SECONDS = 30.0


class Browser:
    """A window.

    Args:
        driver: Of it.
    """

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def open(self, url: str, *, ready: str = "return document.readyState === 'complete'") -> None:
        """Go there, and wait until a script returns what counts as true."""
        self.driver.get(url)
        self.wait(ready)

    def script(self, text: str, *arguments: Any) -> Any:
        """What a script returns, or the promise that it returns."""
        return self.driver.execute_script(text, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """What a script returns as soon as it counts as true."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            found = self.script(script, *arguments)
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"in vain: {script}; console: {self.console()}")

    def press(self, *keys: str) -> None:
        """Keys, one after the other, to whatever has the focus."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def emulate(self, **features: str) -> None:
        """Media features, such as `prefers_color_scheme="dark"`."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})

    def resize(self, width: int, height: int) -> None:
        """The size of what is seen, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def console(self) -> list[str]:
        """Errors and warnings of the pages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        events = [json.loads(entry["message"]) for entry in self.driver.get_log("performance")]
        sent = [e["message"] for e in events if "requestWillBeSent" in e["message"]["method"]]
        return [e["params"]["request"]["url"] for e in sent if "request" in e["params"]]

    def pixels(self, canvas: Any) -> Any:
        """What a canvas shows, shape (height, width, 4)."""
        data = self.script("return arguments[0].toDataURL('image/png')", canvas)
        image = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))
        return np.asarray(image.convert("RGBA"))

    def faults(self) -> list[str]:
        """What axe finds that is serious or critical, each with the elements that have it."""
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe().read_text()})
        found = self.driver.execute_cdp_cmd(
            "Runtime.evaluate",
            {
                "expression": "axe.run().then((found) => JSON.stringify(found.violations))",
                "awaitPromise": True,
                "returnByValue": True,
            },
        )
        return [
            f"{each['id']}: {[node['html'][:150] for node in each['nodes'][:4]]}"
            for each in json.loads(found["result"]["value"])
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
    made = webdriver.Chrome(options=options, service=Service(driver))
    try:
        made.set_script_timeout(SECONDS)
        yield Browser(made)
    finally:
        made.quit()


@cache
def axe() -> Path:
    """The script of axe, fetched once."""
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
