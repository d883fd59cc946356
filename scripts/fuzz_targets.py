"""
Readers of bytes from outside, as scripts/fuzz.py tries them.

A target makes a function of bytes, in the process that will call it. Whatever the bytes are, the
function returns or raises one of the errors that the reader promises, within limits of CPU time and
memory. A target whose reader works in a process of its own, with such limits, may exceed them.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_raw.errors import (
    BadGrammar,
    BadMedia,
    BadSchema,
    ConfigError,
    InvalidRequest,
    ModelLoadFailed,
    PyllamaError,
    RequestError,
    SnapshotFailed,
)

Try = Callable[[bytes], None]
JSON_WORDS = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"1e999", b"-0", b"\\u0000", b"\\ud800", b"NaN")  # fmt: skip
TEXT_WORDS = (
    b"a", b"A", b" ", b"\n", b"\t", b"7", b".", "ü".encode(), "東".encode(), "\u3000".encode(), "🙂".encode(),
    b"<|im_end|>", b"<|im_start|>", b"<s>", "\u2581".encode(), b"a" * 300, b" " * 300, b"7" * 300, b"\xff",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    name: str
    make: Callable[[], Try]
    seeds: Callable[[], list[bytes]]
    allowed: tuple[type[Exception], ...]
    words: tuple[bytes, ...] = ()  # that the format has
    n_head: int = 0  # bytes in front that choose among readers
    max_cpu_s: float = 5.0  # of a case
    max_mib: int = 1024  # of addresses, beside those that there are before
    max_bytes: int = 2**13  # of a case
    may_exceed: bool = False


# -- bodies and heads ---------------------------------------------------------------------


class _Server:
    """The application of a server on a loop of its own."""

    def __init__(self) -> None:
        import logging

        from pyllama_raw.serve import ServeConfig, make_app
        from tests.serve.support import chatting

        logging.disable()
        self.loop = asyncio.new_event_loop()
        engine = self.run(chatting().__aenter__())
        self.app = make_app({"m": engine}, ServeConfig(any_model=True, deadline_s=5))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @property
    def paths(self) -> list[str]:
        from scripts.fuzz_bodies import endpoints

        return sorted(endpoints(self.app))


def _bodies() -> Try:
    server = _Server()
    paths = server.paths

    async def status_of(path: str, body: bytes) -> int:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        unread, statuses, ended = [body], [], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not unread:
                await ended.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif not message.get("more_body", False):
                ended.set()

        await asyncio.wait_for(server.app(scope, receive, send), 60)
        assert len(statuses) == 1, "an answer without a head, or with two"
        return int(statuses[0])

    def attempt(data: bytes) -> None:
        path = paths[data[0] % len(paths)] if data else paths[0]
        status = server.run(status_of(path, data[1:]))
        assert status not in (500, 503), f"{path}: {status}"

    return attempt


def _body_seeds() -> list[bytes]:
    from pyllama_raw.serve import ServeConfig  # noqa: F401 - of the models below
    from scripts.fuzz_bodies import cases

    server = _Server()
    models = _models(server)
    paths = sorted(models)
    return [
        bytes([paths.index(case.path)]) + case.body
        for case in cases(models, 1, 150)
        if len(case.body) < 4096
    ]


def _models(server: _Server) -> dict[str, Any]:
    from scripts.fuzz_bodies import endpoints

    return endpoints(server.app)


class _Transport(asyncio.Transport):
    """A connection whose client has sent all that it will."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def set_protocol(self, protocol: Any) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(
            name, default
        )


def _heads() -> Try:
    import uvicorn
    from uvicorn.server import ServerState

    from pyllama_raw.serve.connections import Connection, Connections
    from pyllama_raw.serve.run import OPTIONS

    server, errors = _Server(), []
    server.loop.set_exception_handler(lambda _, context: errors.append(context))
    connections = Connections(5.0, 5.0, 100)
    config = uvicorn.Config(server.app, http=Connection.of(connections), **OPTIONS)
    config.load()

    async def talk(data: bytes) -> bytes:
        state = ServerState()
        connection = config.http_protocol_class(
            config, state, {}, asyncio.get_running_loop()
        )  # type: ignore[operator,union-attr]
        transport = _Transport()
        connection.connection_made(transport)
        # In two parts, because heads come in any.
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            if part and not transport.closed:
                connection.data_received(part)
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        with_limit = (
            asyncio.wait(state.tasks, timeout=60) if state.tasks else asyncio.sleep(0)
        )
        await with_limit
        assert not state.tasks, "a request goes on without its client"
        return bytes(transport.sent)

    def attempt(data: bytes) -> None:
        errors.clear()
        sent = server.run(talk(data))
        assert not errors, str(errors[0])
        assert b"HTTP/1.1 500" not in sent, sent[:300]
        assert not connections.all, "a connection stays in its group"

    return attempt


def _head_seeds() -> list[bytes]:
    body = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
    path, host = b"/v1/chat/completions", b"Host: a\r\n"
    kind = b"Content-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    chunks = b"%x;a=b\r\n%b\r\n0\r\nTrailer: a\r\n\r\n" % (len(body), body)
    post = b"POST %b HTTP/1.1\r\n%b%b" % (path, host, kind)
    return [
        b"GET /health HTTP/1.1\r\n" + host + b"\r\n",
        b"GET /v1/models?a=%ff&b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"HEAD /livez HTTP/1.1\r\n" + host + b"X-Request-Id: abc\r\n\r\n" * 2,
        b"OPTIONS * HTTP/1.1\r\n" + host + b"Origin: http://a\r\n\r\n",
        post + length + b"\r\n" + body,
        post + chunked + b"\r\n" + chunks,
        post + b"Expect: 100-continue\r\n" + length + b"\r\n" + body,
        post
        + b"Authorization: Bearer a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        + length
        + b"\r\n"
        + body,
        post + length + chunked + b"\r\n" + chunks,
        (b"GET /metrics HTTP/1.1\r\n" + host + b"\r\n") * 20,
    ]


HEAD_WORDS = (
    b"\r\n", b"\n", b"\r\n\r\n", b": ", b" HTTP/1.1\r\n", b"GET ", b"POST ", b"DELETE ", b"Content-Length: ",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"X-Request-Id: \xff\r\n", b"Content-Encoding: gzip\r\n",
    b"%", b"%00", b"/../", b"//", b"?", b"#", b"\x00", b"\xff", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"a" * 5000,
)  # fmt: skip


# -- constraints ----------------------------------------------------------------------------


def _constraint(kind: str, text_of: Callable[[bytes], str]) -> Try:
    """Try it apart, as an engine does, then compile it here and go some way through it."""
    from pyllama_raw.engine import guidance

    tokenizer = guidance.MaskTokenizer(guidance.BYTES, [256], None)
    trials = guidance.Trials(guidance.BYTES, [256])

    def attempt(data: bytes) -> None:
        text = text_of(data)
        trials.n_bytes(kind, text)  # type: ignore[arg-type]
        matcher = guidance._compile(tokenizer, kind, text)  # type: ignore[arg-type]
        rng = random.Random(data)  # noqa: S311 - repeats
        for _ in range(20):
            matcher.compute_mask()
            bits = int.from_bytes(matcher.mask.tobytes(), "little")
            tokens = [token for token in range(256) if bits >> token & 1]
            if matcher.error or not tokens:
                return
            matcher.accept(rng.choice(tokens))

    return attempt


def _schemas() -> Try:
    from pyllama_raw.engine.guidance import checked_schema

    def text_of(data: bytes) -> str:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = data.decode(errors="replace")
        return checked_schema(value)

    return _constraint("json_schema", text_of)


def _schema_seeds() -> list[bytes]:
    texts = {
        "type": "string",
        "pattern": "^[a-z]{1,5}$",
        "minLength": 1,
        "maxLength": 20,
        "format": "date",
    }
    numbers = {
        "type": "number",
        "minimum": -1.5,
        "exclusiveMaximum": 10,
        "multipleOf": 0.5,
    }
    fields = {"a": texts, "b": numbers, "c": {"$ref": "#/$defs/d"}}
    schemas: list[Any] = [
        True,
        texts,
        numbers,
        {"type": ["integer", "null"], "enum": [1, None]},
        {"type": "object", "properties": fields, "required": ["a"], "additionalProperties": False, "$defs": {"d": {"const": {"x": [1]}}}},
        {"type": "array", "items": {"anyOf": [texts, numbers]}, "prefixItems": [{}], "minItems": 1, "maxItems": 3},
        {"allOf": [{"oneOf": [texts, numbers]}, {"not": {"const": 1}}]},
        {"patternProperties": {"^a": texts}, "minProperties": 1, "maxProperties": 2},
        {"$defs": {"t": {"type": "object", "properties": {"left": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"},
    ]  # fmt: skip
    return [json.dumps(schema).encode() for schema in schemas]


SCHEMA_WORDS = tuple(
    word.encode()
    for word in (
        "type", "object", "array", "string", "number", "integer", "properties", "items", "required", "enum", "const",
        "$ref", "#", "#/$defs/d", "$defs", "anyOf", "allOf", "oneOf", "not", "if", "then", "pattern", "format", "uuid",
        "minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems",
        "additionalProperties", "patternProperties", "propertyNames", "dependentSchemas", "prefixItems", "x-guidance",
    )
)  # fmt: skip


def _gbnf() -> Try:
    from pyllama_raw.options.gbnf import to_lark

    def text_of(data: bytes) -> str:
        text = data.decode(errors="surrogateescape")
        return to_lark(
            text,
            "root",
            lambda token: token if isinstance(token, int) and token < 256 else None,
            {256},
        )

    return _constraint("lark", text_of)


def _regex() -> Try:
    from pyllama_raw.options.constraints import with_ascii_classes

    return _constraint(
        "regex", lambda data: with_ascii_classes(data.decode(errors="replace"))
    )


def _lark() -> Try:
    return _constraint("lark", lambda data: data.decode(errors="replace"))


# -- chats ------------------------------------------------------------------------------------

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "r",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "f", "arguments": {"x": 1}},
            }
        ],
    },
    {"role": "tool", "content": "t", "tool_call_id": "1", "name": "f"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]


def _templates() -> Try:
    """
    A template that is read here, where its coverage is seen.

    It may compute for long and take all memory, because an engine runs it apart.
    """
    from pyllama_raw.prompts.rendering.template import CompiledTemplate

    def attempt(data: bytes) -> None:
        source = data.decode(errors="replace")
        template = None
        try:
            template = CompiledTemplate(
                source, {"bos_token": "<s>", "eos_token": "</s>"}
            )
            text, origins = template.render(CHAT, tools=TOOLS)
        except Exception:  # noqa: BLE001 - whatever a stranger's program raises is told by its process
            return
        assert type(text) is str or isinstance(text, str)
        assert len(origins) == len(text), "characters without an origin"
        assert set(origins) <= set("mtd")

    return attempt


def _template_seeds() -> list[bytes]:
    from pyllama_raw.options.chat_templates import TEMPLATES

    return [text.encode() for text in TEMPLATES.values()]


TEMPLATE_WORDS = tuple(
    word.encode()
    for word in (
        "{{", "}}", "{%", "%}", "{%-", "-%}", "{#", "#}", "|", "messages", "message['content']", "message.role", "tools",
        "for", "in", "endfor", "if", "else", "elif", "endif", "set", "endset", "macro", "endmacro", "namespace(", "loop.index0",
        "raise_exception('a')", "strftime_now('%Y')", "tojson", "tojson(indent=4)", "trim", "join(',')", "replace('a', 'b')",
        "split('a')", "items", "upper", "length", "is defined", "is string", "is mapping", "~", "+", "*", "[::-1]", "[1:]",
        "%", "'%s' %", ".format(", "generation", "endgeneration", "break", "continue", "range(3)", "filter", "call",
        "self", "cycler('a')", "joiner()", "lipsum(1)", "dict(a=1)", "__class__", "|attr('a')", "|map('upper')", "|list",
    )
)  # fmt: skip


def _chats() -> Try:
    """Messages, tools and variables of a chat, as a prompt of the template that the first byte names."""
    from pyllama_raw.options.chat_templates import TEMPLATES
    from pyllama_raw.prompts.chat import ChatSettings
    from pyllama_raw.prompts.prompt import PromptEncoder
    from pyllama_raw.testing.vocab import FakeVocab

    encoders = [PromptEncoder(FakeVocab(), text, 2**15) for text in TEMPLATES.values()]

    def attempt(data: bytes) -> None:
        encoder = encoders[data[0] % len(encoders)] if data else encoders[0]
        try:
            chat = json.loads(data[1:])
        except (ValueError, RecursionError):
            chat = data[1:].decode(errors="surrogateescape")
        if not isinstance(chat, dict):
            encoder.read(chat)
            return
        kwargs = chat.get("kwargs")  # an engine takes a mapping only
        variables = kwargs if isinstance(kwargs, dict) else None
        settings = ChatSettings(chat.get("tools"), variables, None)
        encoder.read(chat.get("messages"), settings)  # type: ignore[arg-type]

    return attempt


def _chat_seeds() -> list[bytes]:
    chats = [
        {"messages": CHAT, "tools": TOOLS, "kwargs": {"enable_thinking": False}},
        {"messages": CHAT[1:2] + CHAT[:1]},
        {"messages": [*CHAT[:2], {"role": "assistant", "content": "begun"}], "kwargs": {"add_generation_prompt": False}},
        CHAT[:2],
    ]  # fmt: skip
    return [
        bytes([index]) + json.dumps(chat).encode()
        for index in range(3)
        for chat in chats
    ]


CHAT_WORDS = tuple(
    word.encode()
    for word in (
        "role", "content", "tool_calls", "function", "arguments", "name", "id", "tool_call_id", "reasoning_content",
        "tools", "kwargs", "messages", "type", "text", "user", "assistant", "developer", "<s>", "</s>", "<|im_end|>",
        "add_generation_prompt", "enable_thinking", "description", "parameters", "documents",
    )
)  # fmt: skip


# -- files ------------------------------------------------------------------------------------


def _scratch() -> Path:
    """A folder in memory, which the process that tries the target leaves to its parent."""
    return Path(tempfile.mkdtemp(prefix="plrfuzz", dir=tempfile.gettempdir()))


def _gguf() -> Try:
    """The header of a model, an adapter or a projector."""
    from pyllama_raw.native.adapter import read_adapter
    from pyllama_raw.native.gguf_check import check_gguf
    from pyllama_raw.native.projector import check_projector
    from tests.tiny import tiny_model

    model, path = check_gguf(str(tiny_model("llama"))), _scratch() / "a.gguf"

    def attempt(data: bytes) -> None:
        path.write_bytes(data[1:])
        match data[:1]:
            case b"a":
                read_adapter(str(path), model)
            case b"p":
                check_projector(str(path), on_host=True)
            case _:
                check_gguf(str(path))

    return attempt


def _gguf_seeds() -> list[bytes]:
    from scripts.mutations.gguf_file import File, read
    from tests.tiny import tiny_adapter, tiny_model, tiny_projector

    def small(file: File) -> bytes:
        """Without most of a vocabulary and of the data, which the reader looks at last."""
        return file.encode()[:30_000]

    paths = {
        b"m": tiny_model("llama"),
        b"p": tiny_projector("qwen2vl")[0],
        b"a": tiny_adapter(_adapter()),
    }
    seeds = [kind + small(read(path)) for kind, path in paths.items()]
    return [*seeds, b"m" + b"GGUF\3\0\0\0" + bytes(16)]


def _adapter() -> str:
    from tests.tiny import ADAPTERS

    return next(iter(ADAPTERS))


def _index() -> Try:
    """The index of a cache directory with some states; the first byte says which file is changed."""
    from pyllama_raw.engine.disk_store import DiskStore
    from pyllama_raw.engine.span_keys import SpanKeys
    from pyllama_raw.engine.state_file import parts_of

    original = _store()
    files = sorted(original.iterdir())
    root = _scratch() / "store"

    def attempt(data: bytes) -> None:
        if data[:1] == b"p":
            parts_of(memoryview(data[1:]))
            return
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root)
        name = files[0].name if data[:1] == b"s" else "plrstates.sqlite"
        (root / name).write_bytes(data[1:])
        store = DiskStore(root, "model", 2**20, wait_s=0.0)
        keys = SpanKeys()
        for entry in store.scan(keys):
            store.read(entry.payload)  # type: ignore[arg-type]
        store.write(None, bytes(64), memoryview(bytes(100)))
        store.scan(keys)
        store.close()

    return attempt


def _store() -> Path:
    """A directory that holds three states."""
    from array import array

    from pyllama_raw.engine.disk_store import DiskStore

    folder = _scratch() / "original"
    store = DiskStore(folder, "model", 2**20)
    for number in range(3):
        tokens = array("i", range(number, number + 16)).tobytes()
        store.write("tenant" if number else None, tokens, memoryview(bytes(100)))
    store.close()
    return folder


def _index_seeds() -> list[bytes]:
    from pyllama_raw.engine.state_file import make_head

    folder = _store()
    states = sorted(folder.glob("*.plrstate"))
    parts = make_head([(3, 128), (4, 20)]) + b"abcdefg"
    return [
        b"i" + (folder / "plrstates.sqlite").read_bytes(),
        b"s" + states[0].read_bytes(),
        b"p" + parts,
    ]


# -- images and sounds ----------------------------------------------------------------------


def _images() -> Try:
    from pyllama_raw.media import Image, MediaLimits

    limits = MediaLimits(max_parts=1, max_bytes=2**25, max_pixels=2**22, max_seconds=60)

    def attempt(data: bytes) -> None:
        image = Image(data)
        limits.check([image])
        assert len(image.pixels()) == 3 * image.width * image.height

    return attempt


def _sounds() -> Try:
    from pyllama_raw.media import Audio, MediaLimits

    limits = MediaLimits(max_parts=1, max_bytes=2**25, max_pixels=2**22, max_seconds=60)

    def attempt(data: bytes) -> None:
        sound = Audio(data)
        limits.check([sound])
        assert len(sound.samples(16000)) == sound.n_samples(16000)

    return attempt


def _image_seeds() -> list[bytes]:
    from tests.media import files

    return [
        files.image_file("PNG", 8, 6),
        files.image_file("PNG", 8, 6, mode="1"),
        files.deep_png(6, 6),
        files.image_file("PNG", 8, 6, mode="P"),
        files.image_file("JPEG", 8, 6),
        files.image_file("JPEG", 16, 16, progressive=True),
        files.image_file("JPEG", 8, 6, mode="CMYK"),
        files.image_file("GIF", 8, 6),
        files.image_file("BMP", 8, 6),
        files.image_file("BMP", 8, 6, mode="P"),
        files.image_file("WEBP", 8, 6),
        files.moving("GIF"),
    ]


def _sound_seeds() -> list[bytes]:
    from tests.media import files

    wav = files.wav_file(200, n_channels=2)
    kinds = [files.sound_file(kind, 2000) for kind in ("FLAC", "MP3", "OGG")]
    forms = [
        files.sound_file("WAV", 200, subtype=form)
        for form in ("FLOAT", "PCM_24", "ULAW", "IMA_ADPCM")
    ]
    return [wav, *kinds, *forms]


IMAGE_WORDS = (b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"IEND", b"eXIf", b"\xff\xd8", b"\xff\xda", b"\xff\xc2", b"\xff\xe1", b"Exif\0\0", b"II*\0", b"GIF89a", b"BM", b"RIFF", b"WEBPVP8X", b"ANMF", b"\xff\xff\xff\xff", b"\0\0\0\0")  # fmt: skip
SOUND_WORDS = (b"RIFF", b"WAVE", b"fmt ", b"data", b"LIST", b"fact", b"RF64", b"ds64", b"fLaC", b"OggS", b"vorbis", b"OpusHead", b"ID3", b"TAG", b"\xff\xfb", b"\xff\xff\xff\xff", b"\0\0\0\0")  # fmt: skip


# -- packets and answers ----------------------------------------------------------------------


def _packets() -> Try:
    from pyllama_raw.runners.packet import TensorPacket, asked_by

    def attempt(data: bytes) -> None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict) and "metadata" in value:
            asked_by(value["metadata"])
        packet = TensorPacket.read(value)
        assert TensorPacket.read(packet.told()) == packet
        assert packet.text.encode() == packet.data

    return attempt


def _packet_seeds() -> list[bytes]:
    metadata = {
        "max_new_tokens": 4,
        "timeout_ms": 5.0,
        "priority": 1,
        "seed": 2**40,
        "temperature": 0.5,
        "stop": ["a"],
    }
    packets: list[dict[str, Any]] = [
        {"shape": [1, 3], "dtype": "uint8", "data": [97, 98, 99]},
        {"shape": [1, 3], "dtype": "u8", "data_base64": "YWJj"},
        {"shape": [2], "dtype": "float32", "base64": "AAAAAAAAAAA="},
        {"shape": [], "data": "a"},
    ]  # fmt: skip
    return [json.dumps(packet | {"metadata": metadata}).encode() for packet in packets]


HEADERS_END = b"\n\n"


def _answers() -> Try:
    """
    A service answers with a status, headers and a content, to each verb.

    Whatever comes, the caller has a result or a typed error.
    """
    import httpx2

    from pyllama_raw import SamplingParams
    from pyllama_raw.runners import Backoff, RemoteRunner, Timeouts

    loop, answer = asyncio.new_event_loop(), [b""]

    def handle(_: Any) -> Any:
        head, _, content = answer[0].partition(HEADERS_END)
        first, *lines = head.split(b"\n")
        status = (
            int(first)
            if first.isdigit() and len(first) == 3 and first[:1] != b"1"
            else 200
        )
        headers = [tuple(line.split(b":", 1)) for line in lines if b":" in line]
        halves = content[: len(content) // 2], content[len(content) // 2 :]

        async def parts() -> Any:
            for half in halves:
                yield half

        return httpx2.Response(status, headers=headers, content=parts())

    async def ask(verb: int) -> None:
        transport, limits = httpx2.MockTransport(handle), Timeouts()
        once = Backoff(max_retries=0)
        async with RemoteRunner(
            "http://a", "m", transport=transport, timeouts=limits, backoff=once
        ) as runner:
            match verb % 6:
                case 0:
                    await runner.embed(["a", "b"])
                case 1:
                    await runner.rank("q", ["a", "b"])
                case 2:
                    await runner.card()
                case 3:
                    await runner.version()
                case 4:
                    await runner.health()
                case _:
                    params = SamplingParams(max_tokens=4, n=2, logprobs=1)
                    await runner.generate(
                        "a" if verb < 128 else [{"role": "user", "content": "a"}],
                        params,
                    ).collect()

    def attempt(data: bytes) -> None:
        answer[0] = data[1:]
        loop.run_until_complete(ask(data[0] if data else 0))

    return attempt


def _answer_seeds() -> list[bytes]:
    def event(value: Any) -> bytes:
        return b"data: %b\n\n" % json.dumps(value).encode()

    listed = {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "b", "logprob": -1}],
            }
        ]
    }
    legacy = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}
    call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    head = b"200\ncontent-type: text/event-stream" + HEADERS_END
    plain = b"200\ncontent-type: application/json" + HEADERS_END
    chat = b"".join(
        event({"choices": [choice], "usage": usage})
        for index in (0, 1)
        for choice in (
            {
                "index": index,
                "delta": {"content": "a", "reasoning_content": "r"},
                "logprobs": listed,
            },
            {
                "index": index,
                "delta": {"tool_calls": [call]},
                "finish_reason": "tool_calls",
            },
        )
    )
    text = b"".join(
        event(
            {
                "choices": [
                    {
                        "index": i,
                        "text": "a",
                        "logprobs": legacy,
                        "finish_reason": "stop",
                    }
                ]
            }
        )
        for i in (0, 1)
    )
    error = json.dumps(
        {
            "error": {
                "message": "no",
                "type": "rate_limit_error",
                "code": "context_length_exceeded",
                "param": "a",
            }
        }
    ).encode()
    rows = json.dumps(
        {"data": [{"index": i, "embedding": [0.5, 1]} for i in (1, 0)], "usage": usage}
    ).encode()
    ranks = json.dumps(
        {"results": [{"index": i, "relevance_score": 0.5} for i in (1, 0)]}
    ).encode()
    card = json.dumps(
        {"data": [{"id": "m", "capabilities": ["generate"]}], "build_info": "b1"}
    ).encode()
    refused = (
        b"429\nretry-after: 5\nx-ratelimit-remaining-requests: 1\ncontent-type: application/json"
        + HEADERS_END
        + error
    )
    done = b"data: [DONE]\n\n"
    return [
        b"\x05" + head + text + done, b"\x83" + head + chat + done, b"\x05" + head + event(json.loads(error)),
        b"\0" + plain + rows, b"\1" + plain + ranks, b"\2" + plain + card, b"\3" + plain + card, b"\4" + refused,
        b"\x05" + refused, b"\0" + refused, b"\0" + plain.replace(b"application", b"a\ncontent-encoding: gzip\nb"),
    ]  # fmt: skip


ANSWER_WORDS = (
    *JSON_WORDS, b"data: ", b"\n\n", b"[DONE]", b"event: error\n", b"retry-after: ", b"retry-after-ms: ", b"choices", b"delta",
    b"content", b"logprobs", b"top_logprobs", b"index", b"finish_reason", b"content_filter", b"tool_calls", b"usage",
    b"error", b"message", b"code", b"content-encoding: br\n", b"content-encoding: gzip\n", b"503", b"401", b"302\nlocation: /",
    b"x-ratelimit-limit-requests: ", b"x-ratelimit-reset-tokens: 1h", b"-1", b"1e400", b"charset=utf-16",
)  # fmt: skip


# -- texts ------------------------------------------------------------------------------------


def _texts() -> Try:
    """A text for the tokenizer that the first byte names; special tokens are read if it is odd."""
    from pyllama_raw.native.model import Model
    from scripts.tiny_models.splitting import SPLITTING
    from tests.tiny import tiny_model

    path, vocabs = tiny_model("llama"), {}

    def vocab_of(name: str) -> Any:
        if name not in vocabs:
            model = Model.load(
                path, vocab_only=True, kv_overrides={"tokenizer.ggml.pre": name}
            )
            vocabs[name] = model
        return vocabs[name].vocab

    def attempt(data: bytes) -> None:
        kind = data[0] if data else 0
        vocab = vocab_of(SPLITTING[kind // 2 % len(SPLITTING)])
        text = data[1:].decode(errors="replace")
        is_odd = bool(kind % 2)
        tokens = vocab.tokenize(text, add_special=is_odd, parse_special=is_odd)
        assert all(0 <= token < vocab.n_tokens for token in tokens)

    return attempt


def _text_seeds() -> list[bytes]:
    texts = [
        b"Hello, world! 123\n\n  It's <|im_end|>\t",
        "Ünï東京🙂 \u3000".encode(),
        b"a" * 600,
        b" " * 600 + b"x",
    ]
    return [bytes([number]) + text for number in range(0, 184, 23) for text in texts]


TARGETS = {
    target.name: target
    for target in (
        Target("bodies", _bodies, _body_seeds, (), words=JSON_WORDS, n_head=1),
        Target("heads", _heads, _head_seeds, (), words=HEAD_WORDS, max_bytes=2**17),
        Target("schemas", _schemas, _schema_seeds, (BadSchema,), words=SCHEMA_WORDS),
        Target(
            "gbnf",
            _gbnf,
            lambda: [
                b'root ::= "a" [b-z]* (num | <[65]>){2,3} # c\nnum ::= [0-9]+ ("." [^a\\n\\x41]?)? | "\\u00e4"',
                b"root ::= root | .\n",
            ],
            (BadGrammar, BadSchema),
            words=(b"root", b" ::= ", b"|", b"(", b")", b"*", b"+", b"?", b"{2,3}", b"{,", b"[", b"]", b"^", b'"', b"\\x", b"\\u", b"\\U0010ffff", b"<[1]>", b"!<[2]>", b"\n", b"#", b"."),
        ),
        Target(
            "lark",
            _lark,
            lambda: [
                b'start: "a" rule* -> x\nrule: /[0-9]+/ | TERM{2,3} | %json {"type": "integer"}\nTERM: "b".."z"\n%ignore /\\s+/',
                b'%llguidance {}\nstart: <[65]> gen\ngen[temperature=0.5, capture, stop=""]: /.*/\n%regex {"substring_words": "a b"}',
            ],
            (BadSchema,),
            words=(b"start", b": ", b"|", b"(", b")", b"*", b"+", b"?", b"~2..3", b"{2,3}", b"/", b'"', b"%json ", b"%regex ", b"%ignore ", b"%import ", b"%override ", b"%declare ", b"{}", b"<[1]>", b"<[0-9]>", b"\n", b"//", b"&", b"~", b"..", b"[max_tokens=3]", b"[lazy]", b"@a"),
        ),
        Target(
            "regex",
            _regex,
            lambda: [rb"(a|b)*[c-z\d]{2,5}\w+?(?:x|\p{Lu})\.\s$", rb"^(?i:a)[^\]\-[:alpha:]]\u00e4\x{41}|(?<n>b)&&c"],
            (BadSchema,),
            words=(b"(", b")", b"[", b"]", b"|", b"*", b"+", b"?", b"{1,", b"{1000}", b"\\d", b"\\p{L}", b"\\b", b"(?=", b"(?!", b"(?s:", b"[^", b"--", b"&&", b"~~", b"\\", b"^", b"$", b"."),
        ),
        Target("templates", _templates, _template_seeds, (), words=TEMPLATE_WORDS, max_cpu_s=2, max_mib=512, may_exceed=True),
        Target("chats", _chats, _chat_seeds, (RequestError,), words=CHAT_WORDS, n_head=1),
        Target("gguf", _gguf, _gguf_seeds, (ModelLoadFailed, PyllamaError), words=(b"general.alignment", b"general.architecture", b"llama.block_count", b"split.count", b"\xff" * 8, b"\0" * 8, b"\1\0\0\0"), max_bytes=2**15),
        Target("index", _index, _index_seeds, (ConfigError, SnapshotFailed), words=(b"CREATE TABLE ", b"states", b"\0" * 8, b"\xff" * 4), max_bytes=2**15),
        Target("images", _images, _image_seeds, (BadMedia, InvalidRequest), words=IMAGE_WORDS, max_bytes=2**14),
        Target("sounds", _sounds, _sound_seeds, (BadMedia, InvalidRequest), words=SOUND_WORDS, max_bytes=2**14),
        Target("packets", _packets, _packet_seeds, (InvalidRequest, RequestError), words=(*JSON_WORDS, b"shape", b"dtype", b"data", b"base64", b"metadata", b"max_tokens")),
        Target("answers", _answers, _answer_seeds, (PyllamaError,), words=ANSWER_WORDS, n_head=1),
        Target("texts", _texts, _text_seeds, (InvalidRequest,), words=TEXT_WORDS, n_head=1, max_bytes=2**14),
    )
}  # fmt: skip
