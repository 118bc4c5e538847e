"""A real browser that shows pages: what it has computed of them, and pictures."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.waiting import until

BROWSER = "chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]
TIMEOUT = 60.0

UNPACK = """(async () => {
  const image = new Image();
  image.src = "data:image/png;base64,PACKED";
  await image.decode();
  const pixels = new OffscreenCanvas(image.width, image.height).getContext("2d");
  pixels.drawImage(image, 0, 0);
  const bytes = new Blob([pixels.getImageData(0, 0, image.width, image.height).data]);
  const reader = new FileReader();
  await new Promise(resolve => { reader.onload = resolve; reader.readAsDataURL(bytes); });
  return [image.width, image.height, reader.result.split(",")[1]];
})()"""
"""The pixels of a picture."""


class Tab:
    """One tab, over Chrome's DevTools protocol: scripts of tests run there whatever the page's policy forbids."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **given: object) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": given})
        return await self._until(lambda message: message.get("id") == number)

    async def open(self, url: str, *, width: int, dark: bool = False) -> None:
        """Show a page in a window of this many CSS pixels."""
        await self.call("Log.enable")
        await self.call("Page.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)
        await self._until(lambda message: message.get("method") == "Page.loadEventFired")

    async def computed(self, script: str) -> Any:
        """What a JavaScript expression gives on the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def picture(self) -> npt.NDArray[np.uint8]:
        """The window as ``uint8[height, width, 3]``. Leaves the page, whose policy forbids to unpack it there."""
        packed = (await self.call("Page.captureScreenshot", format="png"))["data"]
        await self.call("Page.navigate", url="about:blank")
        await self._until(lambda message: message.get("method") == "Page.loadEventFired")
        width, height, unpacked = await self.computed(UNPACK.replace("PACKED", packed))
        return np.frombuffer(base64.b64decode(unpacked), np.uint8).reshape(height, width, 4)[..., :3]

    async def _until(self, wanted: Any) -> Any:
        while True:
            message = await self._socket.receive_json(timeout=TIMEOUT)
            if message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                # Browsers ask for an icon by themselves.
                if not entry.get("url", "").endswith("/favicon.ico"):
                    self.complaints.append(json.dumps(entry))
            if wanted(message):
                assert "error" not in message, message
                return message.get("result")


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own."""
    if shutil.which(BROWSER) is None:
        pytest.skip(f"{BROWSER} is not installed")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            BROWSER, *FLAGS, f"--user-data-dir={folder}", "about:blank", stdout=log, stderr=log
        )
    try:
        listens = folder / "DevToolsActivePort"
        await asyncio.to_thread(until, lambda: listens.exists() and "\n" in listens.read_text(), TIMEOUT)
        address = f"127.0.0.1:{listens.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as answer:
                (page,) = [each for each in await answer.json(content_type=None) if each["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()
