"""
Engines over HTTP, as clients of OpenAI's API call them; needs the extra `serve`.

    app = make_app({"assistant": engine})
    await serve(app, ListenConfig(port=8000), print)

The server stands on the public API alone, so an application of one's own can do all that it
does. `pyllama-raw serve MODEL` opens the engines and runs the application.
"""

from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ListenConfig, ModelsConfig, ServeConfig
from pyllama_raw.serve.handlers import streamed, with_client
from pyllama_raw.serve.run import serve

__all__ = [
    "ListenConfig",
    "ModelsConfig",
    "ServeConfig",
    "make_app",
    "serve",
    "streamed",
    "with_client",
]
