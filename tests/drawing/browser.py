"""A headless Chromium over its DevTools protocol, by the standard library alone."""

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page of one browser; events of the page are kept."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-port=0",
                "--window-size=1400,1000",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.events: list[dict[str, Any]] = []
        self._next = 0
        try:
            port = self._port(folder / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            self._connect(port, pages[0]["webSocketDebuggerUrl"].partition(f":{port}")[2])
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _port(self, file: Path) -> int:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if file.exists() and (text := file.read_text()):
                return int(text.split()[0])
            time.sleep(0.05)
        raise TimeoutError("the browser did not start")

    def _connect(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._stream = self._socket.makefile("rb")
        while self._stream.readline().strip():
            pass

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._next += 1
        data = json.dumps({"id": self._next, "method": method, "params": params}).encode()
        head = b"\x81" + (
            bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
        )
        self._socket.sendall(head + b"\0\0\0\0" + data)  # a mask of zeros changes nothing
        while True:
            message = self._read()
            if message.get("id") == self._next:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _read(self) -> dict[str, Any]:
        data, final = b"", False
        while not final:
            first, length = self._stream.read(2)
            if length == 126:
                (length,) = struct.unpack(">H", self._stream.read(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self._stream.read(8))
            data += self._stream.read(length)
            final = bool(first & 0x80)
        return json.loads(data)

    def open(self, url: str) -> None:
        """Load a page, and note its errors and requests."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState + location.protocol == 'completefile:'")

    def wait_for(self, expression: str) -> None:
        """Wait until JavaScript says so."""
        end = time.monotonic() + 60
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"it did not come to {expression}"
            time.sleep(0.05)

    def requests(self) -> list[str]:
        """Return what the page has asked for, but for data within itself."""
        sent = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "about:"))]

    def complaints(self) -> list[str]:
        """Return the page's errors, and what it has written to the console."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [str(event["params"]) for event in self.events if event["method"] in bad]

    def value(self, expression: str) -> Any:
        """Return what JavaScript says."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press, release or turn the wheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self) -> bytes:
        """Return a PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        """End the browser."""
        try:
            self.call("Browser.close")
        finally:
            self._stream.close()
            self._socket.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
