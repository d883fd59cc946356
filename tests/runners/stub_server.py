"""
A server to spawn that has no model: `/health`, and completions that it never ends.

    python stub_server.py WAY

Ways: `well`; `deaf`, which ignores SIGTERM; `loud`, which writes a megabyte first; `three`,
which ends with the code 3; `silent`, which never says where it listens; `busy`, whose `/health`
is 503 after the first answer; `leaves`, which on SIGTERM listens no more and serves what it has;
`drains`, which on SIGTERM answers 503 from then on; `embeds`, which says that its model embeds.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

FOREVER_S = 3600


class Handler(BaseHTTPRequestHandler):
    n_asked: ClassVar = 0
    drains: ClassVar = False

    def do_GET(self) -> None:
        Handler.n_asked += 1
        is_busy = sys.argv[1] == "busy" and Handler.n_asked > 1
        says = sys.argv[1] == "embeds" and self.path == "/v1/models"
        card = {"data": [{"id": "a", "capabilities": ["embed", "dance"]}]}
        content = json.dumps(card).encode() if says else b""
        self.send_response(503 if is_busy or Handler.drains else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        if Handler.drains:
            self.send_error(503)
            return
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {os.environ['STUB_KEY']}":
            self.send_error(401)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.tell({"choices": [{"index": 0, "text": "well", "finish_reason": None}]})
        if fields["prompt"] == "for ever":
            time.sleep(FOREVER_S)
        self.tell({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.tell({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def tell(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def drain(*_: object) -> None:
    Handler.drains = True


def main(way: str) -> None:
    if way == "three":
        sys.stderr.write("the model is missing\n")
        sys.exit(3)
    if way == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if way == "loud":
        sys.stderr.write("a line that nobody reads\n" * 2**16)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if way == "leaves":
        signal.signal(signal.SIGTERM, lambda *_: Thread(target=server.shutdown).start())
    if way == "drains":
        signal.signal(signal.SIGTERM, drain)
    if way != "silent":
        sys.stderr.write(f"serving at http://127.0.0.1:{server.server_port}\n")
    server.serve_forever()
    server.socket.close()
    time.sleep(FOREVER_S)


if __name__ == "__main__":
    main(sys.argv[1])
