"""
A headless Chromium that is told what to do, by the DevTools protocol over two pipes.

Keys and texts come in as a person's would. `until` waits in the page, so nobody has to sleep.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *(
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ),
    *("--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"),
)
LIMIT_S = 30
UNTIL = """new Promise((resolve, reject) => {{
  const end = performance.now() + {limit_s} * 1000;
  const look = () => {{
    const value = ({expression});
    if (value) resolve(value);
    else if (performance.now() > end) reject(new Error("not in time: " + {told}));
    else setTimeout(look, 5);
  }};
  look();
}})"""


class Page:
    """A tab. All that it asked of hosts and all its errors are kept."""

    def __init__(self, to: BinaryIO, back: BufferedReader) -> None:
        self._to, self._from = to, back
        self._ids = count(1)
        self._buffer = b""
        self._session: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.errors: list[str] = []

    def open(self, url: str) -> Self:
        """Go to *url* and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.until(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )
        return self

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (reply := self._read()).get("id") != number:
            self._note(reply)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            got = self._from.read1(2**16)
            assert got, "the browser has ended"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"])
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])

    def value(self, expression: str) -> Any:
        """What *expression* comes to in the page; of a promise, its value."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """The value of *expression* once it is true."""
        text = json.dumps(expression)
        return self.value(
            UNTIL.format(limit_s=limit_s, expression=expression, told=text)
        )

    def text(self, selector: str) -> str:
        """The text that is shown of the last element that *selector* finds."""
        return self.value(
            f"[...document.querySelectorAll({selector!r})].at(-1).innerText"
        )

    def click(self, selector: str) -> None:
        """Press the last element that *selector* finds."""
        self.value(f"[...document.querySelectorAll({selector!r})].at(-1).click()")

    def fill(self, selector: str, text: str) -> None:
        """Type *text* in place of what is in a field."""
        self.value(f"document.querySelector({selector!r}).select()")
        is_focused = f"document.activeElement === document.querySelector({selector!r})"
        assert self.value(is_focused), f"{selector} is hidden"
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "", shift: bool = False) -> None:
        """Press and release a key, by its name and number."""
        keys = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **keys)
        self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def enter(self, shift: bool = False) -> None:
        """Press Enter."""
        self.press("Enter", 13, "\r", shift)

    def size(
        self, width: int, height: int, dark: bool = False, scale: float = 1
    ) -> None:
        """Be that large, and light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", mobile=False, **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def posted(self, path: str) -> list[Any]:
        """Bodies of requests to *path*."""
        return [
            json.loads(request["postData"])
            for request in self.requests
            if request["url"].endswith(path)
        ]


@contextmanager
def browsing(url: str) -> Iterator[Page]:
    """A page at *url*, in a browser of its own that ends with the block."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes = (Path(folder) / "to", Path(folder) / "from")
        script = 'exec "$@" 3<"$TO" 4>"$FROM"'
        for pipe in pipes:
            os.mkfifo(pipe)
        command = ["sh", "-c", script, "sh", PROGRAM, *FLAGS]
        command += [f"--user-data-dir={folder}/profile", "about:blank"]
        environment = os.environ | {"TO": str(pipes[0]), "FROM": str(pipes[1])}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=environment, **quiet)
        try:
            with pipes[0].open("wb") as to, pipes[1].open("rb") as back:
                yield Page(to, back).open(url)
        finally:
            process.kill()
            process.wait()
