"""
The page at `/`: one file that talks to the API as any other client does.

Its policy allows the file's own script and style, by their hashes, and this host; no text can
become markup (`require-trusted-types-for`), and no other page may have it in a frame.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from pyllama_raw.serve.service import Service

POLICY = (
    "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HTML = Path(__file__).with_name("index.html").read_text("utf-8")


def routes(app: FastAPI, service: Service) -> None:  # noqa: ARG001 - the page asks the API
    """Add the endpoint of the page; it needs no key."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        """A chat, and what the engine does."""
        return answer()


def answer() -> Response:
    """The page, which is there before the engines are."""
    headers = {
        "content-security-policy": f"{POLICY}; {_allowed('script')}; {_allowed('style')}",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(HTML, headers=headers)


@cache
def _allowed(tag: str) -> str:
    """The part of the policy that allows the text of the only element *tag*."""
    [text] = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    digest = b64encode(sha256(text.encode()).digest()).decode()
    return f"{tag}-src 'sha256-{digest}'"
