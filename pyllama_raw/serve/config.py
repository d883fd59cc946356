"""Options of the service; those of engines are in EngineConfig."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pyllama_raw import SamplingParams, __version__
from pyllama_raw.options.frozen import Frozen, Mapped
from pyllama_raw.options.requests import MAX_PRIORITY

FILE_ONLY = {  # what the command line has no flag for
    *("defaults", "aliases", "tags", "template_kwargs", "closed", "suffix_first"),
    *("reasoning_format", "tells_prompts"),
}
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
IdleSeconds = Annotated[float, Field(allow_inf_nan=False)]  # below 0: never


class ListenConfig(Frozen):
    """Where a service listens."""

    host: str = "127.0.0.1"
    """
    Address to listen at; 0.0.0.0 is all of the machine's. Several have commas between them, and
    one that ends in .sock is a Unix socket.
    """
    port: Annotated[int, Field(ge=0, le=2**16 - 1)] = 8000
    """Port to listen at; 0 is a free one, which is told."""
    uds: str | None = None
    """A Unix socket to listen at instead."""
    reuse_port: bool = False
    """Other processes may listen at the same port, and the system shares connections out."""
    ends_with: Literal["signal", "parent", "stdin"] = "signal"
    """
    The end of the service, beside signals: also that of the process that started it, or of the
    standard input.
    """
    keep_alive_s: Seconds = 620.0
    """
    Seconds that an idle connection stays open. Proxies close theirs sooner, the slowest ones
    after 600 s, so none uses a connection that is just being closed.
    """
    head_s: Seconds = 10.0
    """Seconds that the head of a request may take to come."""
    max_connections: Annotated[int, Field(ge=1)] | None = None
    """
    Connections at a time; beyond them, one that its client leaves waiting makes room. None: as
    many as file descriptors of the process allow.
    """


class ModelsConfig(Frozen):
    """Models as a cache: which are loaded when, and what gives way."""

    models_dir: str | None = None
    """
    A folder of models: each GGUF file in it, and each folder in it with a GGUF file, perhaps in
    parts, and perhaps a projector (mmproj*.gguf). They are loaded when they are asked for.
    """
    on_demand: bool | None = None
    """
    Models are loaded when they are asked for. None: those of a folder are, and those that are
    named one by one are loaded at the start, unless another option of this kind is set.
    """
    memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Host memory that all models may take together. None: what is free at the start, but a margin."""
    memory: Mapped[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Bytes that all models may take together, by device, as `info` lists them."""
    models_max: Annotated[int, Field(ge=0)] | None = None
    """Models that are loaded at a time, beside the memory that they may take. 0 or None: any number."""
    autoload: bool = True
    """A request loads its model; otherwise only `/models/load` does, or `?autoload=true`."""
    sleep_idle_s: Seconds | None = None
    """Seconds without use after which a model sleeps, which gives its memory back. None: never."""
    unload_idle_s: Seconds | None = None
    """Seconds without use after which a model is unloaded. None: never."""
    turn_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds that a request waits for its model before others have to give way to it."""
    max_model_overtakes: Annotated[int, Field(ge=0)] = 64
    """Later requests of other models that may run before it."""
    model_processes: bool = False
    """
    Each model has a process of its own, so that one that aborts, and the driver of its device, take
    nothing else along. Needs the extra `runners`.
    """
    max_model_waiting: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait for their models."""
    max_model_waiting_bytes: Annotated[int, Field(ge=1)] = 2**28
    """Bytes that the bodies of these may have together; one alone may have more."""


class ServeConfig(Frozen):
    """Options of the service, whatever models it has."""

    any_model: bool = False
    """A name that no model has is taken for the first model that can do what is asked."""
    fetch_media: bool = False
    """Images that a request names by an address are fetched, from public hosts only."""
    fetch_s: Seconds = 10.0
    """Seconds that the fetches of one request may take together."""
    media_path: str | None = None
    """The folder of images and sounds that requests may name, as file://name. None: none."""
    max_body_bytes: Annotated[int, Field(ge=1)] | None = None
    """
    Bytes that a body may have. None: 8 MiB, and 100 MiB if a model takes images or sounds.
    """
    max_body_values: Annotated[int, Field(ge=1)] = 300_000
    """Values that a body may have: numbers, texts, lists and objects, however nested."""
    max_texts: Annotated[int, Field(ge=1)] = 2048
    """
    Prompts, texts and documents that a body may have. A body that asks for text may also have
    no more prompts, each counted `n` times, than half of the requests that may wait.
    """
    body_s: Seconds = 30.0
    """Seconds that a client may take to send its body."""
    ping_s: Seconds = 15.0
    """Seconds of silence after which a stream gets a comment, so that nobody closes it."""
    send_s: Seconds = 60.0
    """Seconds that a client may read nothing of its answer, before the answer is ended."""
    deadline_s: Seconds | None = None
    """`deadline_s` of a request that names none. None: it may take for ever."""
    max_wait_s: Seconds | None = None
    """`max_wait_s` of a request that names none. None: it may wait for ever."""
    drain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds that running requests have to end once the service is to stop."""
    stall_s: Seconds = 60.0
    """Seconds with work and without a step after which `/livez` says that it hangs."""
    api_keys_file: str | None = None
    """
    The file of the keys of clients, a line each; PYLLAMA_RAW_API_KEYS may hold some, too, with
    commas between them. Without any, all may come in.
    """
    salt_by_key: bool = False
    """Each key has cached prefixes of its own, so that nobody can probe those of others."""
    least_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """
    The most urgent `priority` that a request may have, if there are keys and its own is not that
    of `admin`. A lower number is raised to it.
    """
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Most requests of a key in a minute; without keys, of all clients. None: any number."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of prompts and outputs of a key in a minute. None: any number."""
    defaults: SamplingParams = SamplingParams()
    """Those that are set here are for requests that do not say; in a file, `[service.defaults]`."""
    pooling: Literal["mean", "cls", "last", "none"] | None = None
    """
    How the vectors of the tokens of a text become one; none: they do not, and `/embedding` alone
    tells all of them. None: as the file of a model states, and their mean where it states nothing.
    """
    reasoning_alias: bool = False
    """Chats tell what the model thinks as `reasoning`, too, beside `reasoning_content`."""
    cors_origins: tuple[str, ...] = ()
    """
    Origins whose pages may call the service from a browser, also with its cookies for the
    service. "*" stands for any text, as in https://*.example.org, and alone for all origins,
    without cookies; "localhost" is any port of this machine.
    """
    in_place_of: Literal["llama-server"] | None = None
    """
    The server whose defaults the service has, and whose clients it serves: what that server ignores
    is ignored, and named in `x-ignored-fields`.
    """
    aliases: Mapped[str, str] = Field(default_factory=dict)
    """Other names of models, each with the name that the model has here."""
    tags: tuple[str, ...] = ()
    """Words that `/v1/models` tells with each model."""
    template_kwargs: Mapped[str, Any] = Field(default_factory=dict)
    """Variables of chat templates; those of a request win."""
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """`reasoning_format` of chats that name none."""
    tells_prompts: bool = False
    """Whole chats tell their prompts, as if each body had `verbose`."""
    suffix_first: bool = False
    """Gaps of `/infill` have the suffix before the prefix, as some models learnt it."""
    closed: tuple[Literal["metrics", "slots", "props", "page"], ...] = ()
    """Facts that are told to nobody: their endpoints answer 501, and the page 404."""
    metrics_names: tuple[Literal["vllm", "llamacpp"], ...] = ("vllm",)
    """Servers by whose names `/metrics` tells what they tell, beside names of our own."""
    slot_save_path: str | None = None
    """The folder of the files of `/slots/0?action=save` and `restore`. None: there are none."""
    access_log: str | None = None
    """The file that gets a line of JSON for each request; "-" is the standard output."""

    @property
    def build(self) -> str:
        """What runs; in the place of llama-server in its form, a number and a commit."""
        form = "pyllama_raw {}" if self.in_place_of is None else "b0-pyllama_raw-{}"
        return form.format(__version__)
