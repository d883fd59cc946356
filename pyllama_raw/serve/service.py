"""The engines of a service by name, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any, NamedTuple

from pyllama_raw import AsyncEngine
from pyllama_raw.results import Operation, Pooling
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.exchange import AccessLog, Exchange, TextCounter, Traffic
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.keys import ADMIN, Keys
from pyllama_raw.serve.limits import Places, Rates
from pyllama_raw.serve.reading import Bodies

UNPOOLED = (None, Pooling.NONE, Pooling.RANK)  # of models that are made for no vectors


class Found(NamedTuple):
    """The model that a request names."""

    name: str
    engine: AsyncEngine
    adapters: Mapping[str, float] = {}  # of `base:adapter`, each with its scale


class Service:
    """What all answers share. Thread: that of the event loop."""

    def __init__(self, engines: Mapping[str, AsyncEngine], config: ServeConfig) -> None:
        """Raises ConfigError: a file of the options cannot be used."""
        self.engines, self.config = engines, config
        self.drains = False  # drain() was called
        self.started = int(time())  # Unix time
        self.keys, self.rates = Keys(config), Rates(config)
        media = (engine.info.config.media for engine in engines.values())
        has_media = any(options.mmproj is not None for options in media)
        self.bodies, self.traffic = Bodies(config, has_media=has_media), Traffic()
        self._log = None if config.access_log is None else AccessLog(config.access_log)
        for engine in engines.values():
            engine.watch(TextCounter())
        self.places_of = {name: Places([engine]) for name, engine in engines.items()}
        self.places = Places(engines.values())

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.drains = True
        self.bodies.drain()

    def check_texts(self, name: str, n: int) -> None:
        """Raise Failure if the field *name* of a body has too many texts."""
        if n > self.config.max_texts:
            limit = f"at most {self.config.max_texts} are allowed (max_texts)"
            raise refused(name, f"{n} texts are too many: {limit}", "too_many_texts")

    def check_outputs(self, found: Found, n_prompts: int, n: int | None) -> None:
        """Raise Failure if one body asks for so much that all others would have to go."""
        most, n_outputs = self.places_of[found.name].max_outputs, n_prompts * (n or 1)
        if n_outputs > most:
            limit = f"at most {most} at a time (half of max_waiting, and all slots)"
            reason = f"{n_outputs} outputs are too many for one request: {limit}"
            name = "prompt" if n_prompts > 1 else "n"
            raise refused(name, reason, "too_many_outputs")

    def find(self, name: str | None, need: Operation) -> Found:
        """
        The model that *name* stands for; None: the first that can do what is asked.

        Raises:
            Failure: there is no such model.
            Unsupported: it cannot do this.
        """
        has_none = name is None or (self.config.any_model and not self._named(name))
        found = self._first(need) if has_none else self.named(name)
        found.engine.capabilities.check(need)
        return found

    def named(self, name: str | None) -> Found:
        """The model that *name* stands for; None: the first. Raises Failure."""
        found = self._named(next(iter(self.engines)) if name is None else name)
        if found is None:
            message = f"there is no model {name!r}: there are {', '.join(self.engines)}"
            raise Failure(404, "model_not_found", message, "model")
        return found

    def _named(self, name: str) -> Found | None:
        if name in self.engines:
            return Found(name, self.engines[name])
        base, _, adapter = name.rpartition(":")
        if base not in self.engines:
            return None
        engine = self.engines[base]
        has_it = adapter in {info.name for info in engine.adapters()}
        return Found(base, engine, {adapter: 1.0}) if has_it else None

    def _first(self, need: Operation) -> Found:
        """The first model that can do what is asked; of vectors, one that is made for it."""
        able = [
            Found(name, engine)
            for name, engine in self.engines.items()
            if need in engine.capabilities.operations
        ]
        if need is Operation.EMBED:
            able.sort(key=lambda f: f.engine.capabilities.model.pooling in UNPOOLED)
        return able[0] if able else self.named(None)

    def options_of(self, exchange: Exchange, options: Any) -> Any:
        """
        *options* of a request as its key may have them.

        The client is the owner of the key, so that keys get equal shares whatever names their
        requests give; these are left to a policy of the service, as `policy_data`.
        """
        key, options = exchange.key, options.copy()
        if key is None:
            return options
        if key.name != ADMIN:
            least = self.config.least_priority
            if options.get("priority", least) < least:
                options["priority"] = least
                exchange.ignored.append("priority")
        return options

    def text_options_of(self, exchange: Exchange, options: Any) -> Any:
        """*options* of a request for text as its key may have them, as options_of()."""
        key, options = exchange.key, self.options_of(exchange, options)
        if key is None:
            return options
        if self.config.salt_by_key:
            options["cache_salt"] = key.salt(options.get("cache_salt"))
        name = options.get("client")
        options["client"] = key.name
        if name is not None:
            options["policy_data"] = {
                "client": name,
                **(options.get("policy_data") or {}),
            }
        return options

    def ended(self, exchange: Exchange, route: str) -> None:
        """Count a request and its tokens, and write it down."""
        self.traffic.ended(exchange, route)
        self.bodies.ended(exchange.n_read)
        n_tokens = exchange.n_prompt + exchange.n_output
        self.rates.charge("tokens", exchange.client, n_tokens)
        if self._log is not None:
            self._log.write(exchange)
