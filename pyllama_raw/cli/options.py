"""
Flags of the commands, and the configuration of an engine that they make.

Without a flag the default of config.py holds, or what a profile says. Differences of a profile from
the model or the machine that it is used with are told.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pyllama_raw.cli.flags import (
    adapter,
    add,
    add_fields,
    add_switch,
    count,
    positive,
    whole_number,
)
from pyllama_raw.errors import ConfigError
from pyllama_raw.options.chat_templates import AUTO
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    LogConfig,
    MediaConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from pyllama_raw.options.frozen import descriptions
from pyllama_raw.options.machine import MAX_OTHERS, cpu_name, n_cpus
from pyllama_raw.options.profile import MachineFacts, Profile, Settings
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import CONSTRAINTS, SamplingParams

CHAT_CTX = 8192  # cells; a model that knows less uses less
CHAT_TOKENS = 1024  # of an answer
FIT_CTX = 4096  # fit_ctx of commands, where nobody says
FILE_HELP = "a GGUF file, or hf:OWNER/REPO/FILE"
MODEL_HELP = f"{FILE_HELP}; without it a small model is fetched once"
SAMPLING = tuple(SamplingParams.model_fields)
OF_LINE = ", ".join((*SAMPLING, *RequestOptions.__annotations__))
GROUPS = {
    "sampling, where a line does not say otherwise": (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
        *("from_model", "stop", "ignore_eos"),
    ),
    "forms that outputs keep; one of": CONSTRAINTS,
    "more samplers": (
        *("stages", "min_tokens", "typical_p", "top_n_sigma"),
        *("xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"),
        *("repeat_penalty", "frequency_penalty", "presence_penalty", "penalty_last_n"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n"),
        *("mirostat", "mirostat_tau", "mirostat_eta"),
    ),
}
ENGINE: tuple[tuple[type[BaseModel], tuple[str, ...]], ...] = (
    (SchedulerConfig, ("n_slots", "token_budget", "target_step_s", "context_full")),
    (SchedulerConfig, ("policy", "budget_mode", "prefill_order")),
    (EngineConfig, ("deterministic", "sampler_placement")),
    (ContextConfig, ("n_ctx", "n_threads", "n_threads_batch", "n_batch", "n_ubatch")),
    (ContextConfig, ("flash_attn", "kv_unified", "type_k", "type_v")),
)
DEVICES = ("devices", "n_gpu_layers", "split_mode", "main_gpu")
CACHE = (
    *("mode", "snapshot_interval_tokens", "max_bytes", "max_entries", "directory"),
    "max_disk_bytes",
)
LOGS = ("step_log", "request_log")


def add_generate(parser: ArgumentParser) -> None:
    """Flags of `generate`."""
    text = "text to go on from; a first one that ends in .gguf names the model"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=text)
    text = "JSON lines with prompt (text or token ids) or messages, and for each line any of"
    add(parser, "--input", str, "FILE", f"{text}: {OF_LINE}; - is stdin")
    add_switch(parser, "--chat", "a PROMPT is a message to the model")
    add(parser, "--system", str, "TEXT", "with --chat: how the model should behave")
    text = "an image before each PROMPT; repeatable"
    add(parser, "--image", Path, "FILE", text, dest="images", action="append")
    text = "a sound before each PROMPT, behind the images; repeatable"
    add(parser, "--audio", Path, "FILE", text, dest="sounds", action="append")
    add_fields(parser, MediaConfig, ("mmproj",))
    add_switch(parser, "--jsonl", "one JSON object a request on stdout")
    add(parser, "--summary", Path, "FILE", "write totals and latencies as JSON")
    _add_model(parser)
    group = parser.add_argument_group("requests")
    text = descriptions(TextOptions)["deadline_s"]
    add(group, "--deadline-s", positive, "S", text)
    add_fields(group, SamplingParams, ("n", "logprobs", "prompt_logprobs"))
    _add_sampling(parser)
    add_engine(parser)


def add_chat(parser: ArgumentParser) -> None:
    """Flags of `chat`."""
    add_model_argument(parser)
    add(parser, "--system", str, "TEXT", "how the model should behave")
    _add_model(parser)
    _add_sampling(parser, max_tokens=CHAT_TOKENS)
    add_engine(parser, n_slots=1, n_ctx=CHAT_CTX)


def add_model_argument(parser: ArgumentParser) -> None:
    """The model as an argument, as other commands have it; --model names it, too."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=MODEL_HELP)


def _add_model(parser: ArgumentParser) -> None:
    add(parser, "--model", str, "MODEL", MODEL_HELP)
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        type=adapter,
        default=[],
        metavar="NAME=FILE[:SCALE]",
        help="a LoRA or control vector, and the scale of its effect (1); repeatable",
    )


def _add_sampling(parser: ArgumentParser, **defaults: int) -> None:
    """Flags of everything that generates text; a command may have other defaults."""
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        add_fields(group, SamplingParams, names, **defaults)


def add_embed(parser: ArgumentParser) -> None:
    """Flags of `embed`."""
    _add_texts(parser, "TEXT", "to make a vector of")
    add(parser, "--dimensions", count, "N", "only the first of each vector")
    add_switch(parser, "--raw", "vectors as they are, not of length 1")
    add_switch(parser, "--truncate", "cut the end off texts that are too long")
    parser.add_argument(
        "--pooling",
        choices=("mean", "cls", "last"),
        help="how the vectors of tokens become one (as the model says)",
    )
    add_switch(parser, "--tokens", "a vector for each token, not one a text")
    text = "write all vectors as one array, not as JSON lines"
    add(parser, "--npy", Path, "FILE", text)
    add_engine(parser)


def add_rank(parser: ArgumentParser) -> None:
    """Flags of `rank`."""
    parser.add_argument("query", metavar="QUERY", help="what documents are to answer")
    _add_texts(parser, "DOCUMENT", "to rank")
    add_engine(parser)


def _add_texts(parser: ArgumentParser, metavar: str, text: str) -> None:
    parser.add_argument("texts", nargs="*", metavar=metavar, help=text)
    text = 'lines: text, a JSON string, or an object with "text"; - is stdin'
    add(parser, "--input", str, "FILE", text)
    add(parser, "--model", str, "MODEL", FILE_HELP)
    group = parser.add_argument_group("steps of texts")
    add_fields(group, EmbeddingConfig, tuple(EmbeddingConfig.model_fields))


def add_info(parser: ArgumentParser) -> None:
    """Flags of `info`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_switch(parser, "--json", "as one JSON object")
    add_switch(parser, "--build", "how the library was built, and how to build another")
    add_fields(parser, MediaConfig, ("mmproj",))
    add_engine(parser)


def add_engine(parser: ArgumentParser, **defaults: int) -> None:
    """Flags of everything that opens a model; a command may have other defaults."""
    parser.set_defaults(note_of=note_of)  # told before the command runs
    group = parser.add_argument_group("engine")
    text = (
        "options, and the model if none is named, as `tune` wrote them; other flags win"
    )
    add(group, "--profile", str, "FILE", text)
    for model, names in ENGINE:
        add_fields(group, model, names, **defaults)
    group.add_argument(
        "--deterministic-fast",
        dest="deterministic",
        action="store_const",
        const="fast",
        help="the fast way of it",
    )
    text = f"{descriptions(SpeculationConfig)['mode']} (auto)"
    add(group, "--speculation", str, "auto|off|lookup|draft|mtp", text)
    text = "a draft model: a smaller one of the same vocabulary, as a file or hf:OWNER/REPO/FILE"
    add(group, "--draft", str, "MODEL", f"{text} (none)")
    text = f"{descriptions(EngineConfig)['fit_ctx']} ({FIT_CTX})"
    add(group, "--fit-ctx", whole_number, "N", text)
    add_fields(parser.add_argument_group("devices"), ModelConfig, DEVICES)
    group = parser.add_argument_group("chats")
    text = "the chat template: a name such as chatml or hermes, a file, or Jinja text"
    add(
        group,
        "--chat-template",
        str,
        "TEMPLATE",
        f"{text} (the model's own, or chatml)",
    )
    add_fields(group, ModelConfig, ("template_process",))
    add_fields(parser.add_argument_group("prefix cache"), CacheConfig, CACHE)
    add_fields(parser.add_argument_group("logs"), LogConfig, LOGS)


def engine_config(options: Namespace) -> EngineConfig:
    """
    Raises:
        ConfigError: names the flag that is out of range.
    """
    parts = given_parts(options)
    # The inputs are in memory already: only their number is limited.
    parts["scheduler"] = {"max_waiting_tokens": 2**40} | parts["scheduler"]
    # The adapters are named one by one: there is nothing to give way.
    parts["engine"] = {"max_adapter_bytes": 2**60} | parts["engine"]
    settings = Settings(engine={"fit_ctx": FIT_CTX}, model={"chat_template": AUTO})
    settings = settings.updated(profile_of(options).settings.model_dump())
    return settings.updated(parts).engine_config()


def given_parts(options: Namespace) -> dict[str, dict[str, Any]]:
    """Options of engines that were given, by the parts of Settings."""
    of_parts: dict[str, Iterable[str]] = {
        "model": ModelConfig.model_fields,
        "context": ContextConfig.model_fields,
        "scheduler": SchedulerConfig.model_fields,
        "cache": CacheConfig.model_fields,
        "embedding": EmbeddingConfig.model_fields,
        "media": ("mmproj",),
        "log": LogConfig.model_fields,
        "engine": ("sampler_placement", "deterministic", "fit_ctx"),
    }
    parts = {part: given(options, names) for part, names in of_parts.items()}
    # The mode has the name of its part.
    names = {"speculation": "mode", "draft": "draft"}
    of_drafts = {names[k]: v for k, v in given(options, names).items()}
    return parts | {"speculation": of_drafts}


def profile_of(options: Namespace) -> Profile:
    """The one that was named, or one without any option."""
    return Profile() if options.profile is None else Profile.load(options.profile)


def model_spec(options: Namespace) -> str | Path | None:
    """The model that was named, or the profile's; None: the default one."""
    return named_model(options) or profile_of(options).path


def named_model(options: Namespace) -> str | None:
    """
    The model that an argument or --model names; None: neither does.

    Raises:
        ConfigError: both do.
    """
    argument: str | None = getattr(options, "model_argument", None)
    if argument is not None and options.model is not None:
        given_twice = f"{argument!r} and --model {options.model!r}"
        raise ConfigError(f"{given_twice} are two models: give one of them")
    model: str | None = argument or options.model
    return model


def given(options: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Options among *names* that were given, with their values."""
    values = vars(options)
    return {name: values[name] for name in names if values.get(name) is not None}


def note_of(options: Namespace) -> str | None:
    """One line of what does not fit the profile of *options*; None if all does."""
    if getattr(options, "profile", None) is None:
        return None
    profile = profile_of(options)
    differences = "; ".join(
        _misfits(profile, options.model, MachineFacts(cpu=cpu_name(), n_cpus=n_cpus()))
    )
    return f"note: profile {options.profile}: {differences}" if differences else None


def is_busy(profile: Profile) -> bool:
    """Whether others ran beside the measurements."""
    return (profile.others_cpus or 0.0) > MAX_OTHERS


def _misfits(profile: Profile, model: str | None, here: MachineFacts) -> Iterator[str]:
    tuned = profile.path
    file = Path(model) if model is not None else tuned
    if tuned is not None and file is not None and _differs(file, profile):
        yield f"it was measured with another model, {tuned.name}"
    there = profile.machine
    if there is not None and there != here:
        yield (
            f"it was measured on another machine, {there.cpu} with {there.n_cpus} CPUs"
        )
    if is_busy(profile):
        yield f"other processes used {profile.others_cpus:.2f} CPUs while it was measured"


def _differs(file: Path, profile: Profile) -> bool:
    """Whether *file* has another name or size than the model of *profile*."""
    assert profile.path is not None
    if file.name != profile.path.name:
        return True
    is_known = profile.model_bytes is not None and file.is_file()
    return is_known and file.stat().st_size != profile.model_bytes
