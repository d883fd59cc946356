"""
A service over HTTP as a runner: any that has OpenAI's API; needs the extra `runners`.

Order of a request: a turn by the limits, then tries; each try passes the breaker and has its
limits of time. A service that hangs is not asked again after the first delta.

A dialect has the words of a service. A parameter that is not set is not sent, so the service's own
default holds, also for max_tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from urllib.parse import urlsplit

from anyio import CancelScope, move_on_after

from pyllama_raw import Prompt
from pyllama_raw.api.results import Ranked
from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    InvalidRequest,
    PyllamaError,
    Unsupported,
    shown,
)
from pyllama_raw.options.frozen import check_value
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.capabilities import (
    VERBS,
    Prices,
    RunnerCapabilities,
    Verb,
    are_messages,
)
from pyllama_raw.runners.connection import (
    ServiceAnswer,
    check_coding,
    content_of,
    event_data,
    http_library,
    reading,
    refusal,
    written,
)
from pyllama_raw.runners.errors import NetworkError, RunnerTimeout
from pyllama_raw.runners.guards import (
    Backoff,
    Breaker,
    Limits,
    RetryBudget,
    Timeouts,
    Turnstile,
    retried,
    timed,
)
from pyllama_raw.runners.runner import (
    CHARACTERS_A_TOKEN,
    ModelRunner,
    RebuildCause,
    RunnerHealth,
    RunnerKind,
    Source,
)

if TYPE_CHECKING:
    import httpx2

    from pyllama_raw.api.embedding import TextPooling
    from pyllama_raw.api.vectors import Vectors


SHARED = frozenset(
    {"max_tokens", "temperature", "top_p", "seed", "stop", "n", "frequency_penalty"}
    | {"presence_penalty", "logit_bias", "logprobs", "json_schema"}
)
TRANSLATED = frozenset({"max_tokens", "logprobs", "json_schema"})
NOTHING: tuple[Any, ...] = (None, [], {})
OF_CHATS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
OF_LLAMA = frozenset(
    {"top_k", "min_p", "typical_p", "top_n_sigma", "repeat_penalty", "grammar"}
    | {"xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"}
    | {"dry_allowed_length", "mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos"}
    | {"dynatemp_range", "dynatemp_exponent"}
)
RENAMED = {"template_kwargs": "chat_template_kwargs"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The words of one kind of service."""

    max_tokens: str = "max_completion_tokens"
    """The field for the limit of tokens in chats; completions have max_tokens."""
    reasoning: tuple[str, ...] = ("reasoning_content", "reasoning")
    """Fields in which reasoning may come."""
    sampling: frozenset[str] = SHARED
    """Names of SamplingParams that it takes."""
    options: frozenset[str] = OF_CHATS
    """Names of RequestOptions that it takes."""
    extra: tuple[tuple[str, Any], ...] = ()
    """Further fields of every request."""
    schema: str = "response_format"
    """The field for a JSON schema in completions; chats have response_format."""
    ranks: bool = False
    """Whether it has `/rerank`."""
    pooling: bool = False
    """Whether its `/embeddings` takes the way of pooling."""

    @property
    def capabilities(self) -> RunnerCapabilities:
        """The abilities that its words can ask for."""
        return RunnerCapabilities(
            verbs=VERBS if self.ranks else VERBS - {"rank"},
            logprobs=True,
            tools="tools" in self.options,
            json_schema=True,
            grammars="grammar" in self.sampling,
            n=True,
            token_ids=True,
            sampling=self.sampling,
            options=self.options,
        )

    def request(
        self,
        model: str,
        prompt: Prompt,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """The path of a request, and its body."""
        is_chat = are_messages(prompt)
        fields = params.model_dump(include=params.model_fields_set, mode="json")
        body: dict[str, Any] = {"model": model, "stream": True, **dict(self.extra)}
        body["stream_options"] = {"include_usage": True}
        body |= {
            name: value
            for name, value in fields.items()
            if name not in TRANSLATED and value not in NOTHING
        }
        if "max_tokens" in params.model_fields_set:
            body[self.max_tokens if is_chat else "max_tokens"] = params.max_tokens
        if params.json_schema is not None:
            schema, field = fields["json_schema"], "response_format"
            if not is_chat and self.schema != field:
                body[self.schema] = schema
            else:
                named_schema = {"name": "output", "schema": schema, "strict": True}
                body[field] = {"type": "json_schema", "json_schema": named_schema}
        if params.logprobs is not None:
            listed = {"logprobs": True, "top_logprobs": params.logprobs}
            body |= listed if is_chat else {"logprobs": params.logprobs}
        body |= {RENAMED.get(n, n): v for n, v in options.items() if v is not None}
        choice = body.get("tool_choice", "auto")
        if choice not in ("auto", "none", "required"):
            body["tool_choice"] = {"type": "function", "function": {"name": choice}}
        content = prompt if isinstance(prompt, str) else list(prompt)
        if is_chat:
            return "chat/completions", body | {"messages": content}
        return "completions", body | {"prompt": content}


OPENAI = Dialect()
COMPATIBLE = Dialect(max_tokens="max_tokens")
LLAMA_SERVER = Dialect(
    max_tokens="max_tokens",
    sampling=SHARED | OF_LLAMA,
    options=OF_CHATS | {"template_kwargs"},
    schema="json_schema",
    ranks=True,
)
PYLLAMA = Dialect(
    max_tokens="max_tokens",
    sampling=frozenset(SamplingParams.model_fields) - {"prompt_logprobs"},
    options=OF_CHATS
    | {"template_kwargs", "priority", "deadline_s", "max_wait_s", "cache_salt"}
    | {"client", "adapters", "policy_data", "speculation"},
    ranks=True,
    pooling=True,
)


logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_STREAM = (
    2**26
)  # characters of events, beside those of each token that was asked for
STREAM_A_TOKEN = 2**12  # with 20 log-probabilities
MAX_ANSWER_BYTES = 2**20  # of an answer at once, beside those of each text
BYTES_A_TEXT = 2**19  # a vector of 16,384 numbers, or a text that comes back


class RemoteRunner(ModelRunner):
    """
    A service that has OpenAI's API.

    Args:
        url: of the API, such as `http://127.0.0.1:8000/v1`; `/v1` may be left out.
        model: the name that the service has for the model.
        dialect: its words.
        verbs: what the model can do. None: all that the dialect has words for.
        transport: of httpx2, for sockets of Unix and for tests.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        dialect: Dialect = COMPATIBLE,
        verbs: Iterable[Verb] | None = None,
        timeouts: Timeouts | None = None,
        backoff: Backoff | None = None,
        limits: Limits | None = None,
        breaker: Breaker | None = None,
        prices: Prices | None = None,
        name: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        check_value("model", model, str)
        http, self._url, host = http_library(), *_address(url)
        super().__init__(
            name or f"{model} at {host}",
            dialect.capabilities.only(verbs),
            prices,
        )
        self._model, self._dialect = model, dialect
        self._timeouts = timeouts or Timeouts()
        self._breaker = breaker or Breaker()
        self._breaker.name = self._breaker.name or self.name
        self._retries = RetryBudget(backoff or Backoff())
        self.limits = limits or Limits()
        self._gate = Turnstile(self.limits)
        self._headers = _headers(api_key)
        self._client: httpx2.AsyncClient = http.AsyncClient(
            base_url=f"{self._url}/",
            headers={"accept-encoding": "gzip, deflate"},  # see connection.check_coding
            timeout=http.Timeout(None, connect=self._timeouts.connect_s),
            transport=transport,
        )

    @property
    def kind(self) -> RunnerKind:
        """A service."""
        return RunnerKind.REMOTE

    async def rebuild(
        self,
        api_key: str | EllipsisType | None = ...,
        *,
        cause: RebuildCause = RebuildCause.MANUAL,
    ) -> None:
        """
        Begin anew with the service: its breaker is closed, and *api_key* is for new requests.

        Requests under way keep the old key.

        Args:
            api_key: None is none; left out, it stays.

        Raises:
            Unsupported: *cause* is the device of a model here.
        """
        if cause is RebuildCause.DEVICE_POISONED:
            raise Unsupported(f"rebuild for {cause}", "the service has the device")
        if not isinstance(api_key, EllipsisType):
            self._headers = _headers(api_key)
        self._breaker.succeeded()
        logger.info("%s begins anew: %s", self.name, cause)

    async def health(self) -> RunnerHealth:
        """The answer of `/health` within `Timeouts.health_s`, or `/models` if there is none."""
        if self._closed:
            return RunnerHealth(live=False, ready=False, detail="closed")
        limit_s, status = self._timeouts.health_s, 0
        detail = f"no answer within {limit_s:g} s"
        with move_on_after(limit_s):
            try:
                status = await self._status(f"{self._url.removesuffix('/v1')}/health")
                if status == 404:
                    status = await self._status("models")
                detail = f"status {status}"
            except Exception as error:  # noqa: BLE001 - whatever a service leads to
                detail = str(error) or type(error).__name__
        ready = status == 200 and self._breaker.state != "open"
        live = 0 < status < 500 or status == 503
        return RunnerHealth(live, ready, self.n_open, detail=detail)

    async def card(self) -> Mapping[str, Any]:
        """
        The entry of the model in the service's list of models; empty if it lists no such one.

        Raises:
            PyllamaError: as a request.
        """
        async with self._answer("GET", "models") as response:
            models = json.loads(await content_of(response, MAX_ANSWER_BYTES))["data"]
            cards = {card["id"]: card for card in models if isinstance(card, dict)}
            return cards.get(self._model, {})

    async def version(self) -> str | None:
        """
        The version of the program that serves, as `/props` of llama-server and of ours tells it.

        Raises:
            PyllamaError: as a request.
        """
        root = self._url.removesuffix("/v1")
        async with self._answer("GET", f"{root}/props") as response:
            props = json.loads(await content_of(response, MAX_ANSWER_BYTES))
            version = props.get("build_info")
            return shown(version).strip("'") if isinstance(version, str) else None

    async def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        *,
        pooling: TextPooling | None = None,
        **options: Unpack[TextOptions],
    ) -> Vectors:
        """A vector for each text, as the service makes it."""
        import numpy as np

        from pyllama_raw.api.vectors import vectors_of

        inputs = [text if isinstance(text, str) else list(text) for text in texts]
        fields: dict[str, Any] = {"input": inputs, **options}
        if pooling is not None:
            if not self._dialect.pooling:
                raise Unsupported("pooling", "the service takes none: leave it out")
            fields["pooling"] = pooling

        def vectors(body: Any) -> Vectors:
            ordered = sorted(body["data"], key=lambda row: row["index"])
            if any(type(row["index"]) is not int for row in ordered):
                raise ValueError("an index that is no whole number")
            rows = np.array([row["embedding"] for row in ordered], np.float32)
            is_table = rows.ndim == 2 and bool(np.isfinite(rows).all())
            if len(rows) != len(inputs) or not (is_table or not inputs):
                raise ValueError(f"{rows.shape} for {len(inputs)} texts")
            n_tokens = int((body.get("usage") or {}).get("prompt_tokens") or 0)
            return vectors_of(rows, n_tokens, normalize=False)

        return await self._whole("embed", "embeddings", fields, len(inputs), vectors)

    async def rank(
        self, query: str, documents: Iterable[str], **options: Unpack[TextOptions]
    ) -> list[Ranked]:
        """*documents*, the best first."""
        texts = list(documents)
        fields = {"query": query, "documents": texts, **options}

        def ranks(body: Any) -> list[Ranked]:
            rows = [
                (row["index"], float(row["relevance_score"])) for row in body["results"]
            ]
            if any(type(i) is not int or not 0 <= i < len(texts) for i, _ in rows):
                raise ValueError("an index of no document")
            # No order has a place for what is not a number, or for a document twice.
            if len(dict(rows)) < len(rows) or not all(isfinite(s) for _, s in rows):
                raise ValueError("a document twice, or a score that is no number")
            ranked = [Ranked(index, score, {"0": score}, 0) for index, score in rows]
            return sorted(ranked, key=lambda entry: -entry.score)

        return await self._whole("rank", "rerank", fields, len(texts), ranks)

    async def aclose(self) -> None:
        """Close the connections; requests under way end with ClosedError."""
        self._closed = True
        with CancelScope(shield=True):
            await self._client.aclose()

    # -- inside ---------------------------------------------------------------

    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        try:
            path, body = self._dialect.request(self._model, prompt, params, options)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(
                "request", prompt, f"what JSON has: {error}"
            ) from error
        content, n_most = written(body), params.n * params.max_tokens
        stream = partial(self._streamed, path, content, params)
        return self._tried(stream, content, n_most)

    async def _streamed(
        self, path: str, content: bytes, params: SamplingParams
    ) -> Source:
        """One try of a stream."""
        answer = ServiceAnswer(params.n, self._dialect.reasoning, params.seed)
        max_bytes = MAX_STREAM + params.n * params.max_tokens * STREAM_A_TOKEN
        async with self._answer("POST", path, content) as response:
            yield None
            async with aclosing(event_data(response, max_bytes)) as events:
                async for data in events:
                    for delta in answer.take(json.loads(data)):
                        yield delta
            for result in answer.results():
                yield result

    async def _whole(
        self,
        verb: Verb,
        path: str,
        fields: dict[str, Any],
        n_texts: int,
        read: Callable[[Any], T],
    ) -> T:
        """The answer at once to a request that has no stream, as *read* reads it."""
        self.capabilities.check_verb(verb)
        self._check_open()
        content = written({"model": self._model, **fields})
        max_bytes = MAX_ANSWER_BYTES + 2 * len(content) + n_texts * BYTES_A_TEXT

        async def once() -> AsyncGenerator[T, None]:
            async with self._answer("POST", path, content) as response:
                value = read(json.loads(await content_of(response, max_bytes)))
            yield value

        async with self._counting():
            [value] = [item async for item in self._tried(once, content)]
        return value

    async def _tried(
        self,
        make: Callable[[], AsyncGenerator[T, None]],
        content: bytes,
        n_most: int = 0,
    ) -> AsyncGenerator[T, None]:
        """Items that *make* gives, by all rules of this runner; *n_most* tokens of output."""
        n_tokens = len(content) // CHARACTERS_A_TOKEN + n_most

        tries = retried(
            lambda: timed(make(), self._timeouts),
            self._wait_s,
            self._breaker.watching,
        )
        async with self._gate.entered(n_tokens), aclosing(tries) as source:
            self._retries.earn()
            async for item in source:
                yield item

    def _wait_s(self, attempt: int, error: PyllamaError) -> float | None:
        """Seconds until another try; None: there is none."""
        wait_s = self._retries.wait_s(attempt, error)
        if wait_s is not None:
            self.counts.n_retries += 1
            message = "%s: try %d failed, another one in %.1f s: %s"
            logger.warning(message, self.name, attempt + 1, wait_s, error)
        return wait_s

    async def _status(self, url: str) -> int:
        """The status of an answer that nobody reads."""
        request = self._client.stream("GET", url, headers=self._headers)
        async with request as response:
            return response.status_code

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, content: bytes | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """
        An answer that begins well; what is wrong with it, in the block, too, is an error of ours.
        """
        headers = {"content-type": "application/json"}
        async with self.exchange(method, path, content, headers) as response:
            with reading(f"{self.name}, {path}"):
                self._gate.note_headers(response.headers)
                if response.status_code != 200:
                    raise await refusal(response)
                check_coding(response)
                yield response

    @asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """
        A block with the answer to one request, whatever its status, whose content is not read yet.

        Args:
            path: behind `/v1/`, or beginning with `/`.

        Raises:
            RunnerTimeout, NetworkError: there is none, or it broke off.
            ClosedError: the runner is closed.
        """
        import httpx2

        self._check_open()
        texts = {**self._headers, **(headers or {})}
        own = [
            (n.encode(), v if isinstance(v, bytes) else v.encode("ascii"))
            for n, v in texts.items()
        ]
        # A path from the root is not below the API.
        url = f"{self._url.removesuffix('/v1')}{path}" if path[:1] == "/" else path
        try:
            async with self._client.stream(
                method, url, content=content, headers=own
            ) as response:
                yield response
        except httpx2.ConnectTimeout as error:
            raise RunnerTimeout("connect", self._timeouts.connect_s or 0) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if self._closed:
                raise ClosedError(f"{self!r}: it was closed meanwhile") from error
            message = f"{self.name}: {str(error) or type(error).__name__}"
            is_sent = not isinstance(error, httpx2.ConnectError)
            raise NetworkError(message, is_sent=is_sent) from error


def _address(url: str) -> tuple[str, str]:
    """*url* of an API with its path, and its host. Raises ConfigError."""
    import httpx2

    try:
        parts = urlsplit(url)
        path = "/v1" if parts.path in ("", "/") else ""
        address, host = url.rstrip("/") + path, parts.hostname or ""
        httpx2.URL(f"{address}/")
        is_good = parts.scheme in ("http", "https") and bool(host.encode("idna"))
    except (ValueError, TypeError, AttributeError, httpx2.InvalidURL):
        is_good, address, host = False, "", ""
    if not is_good:
        raise ConfigError(
            f"url={shown(url)} is no address of HTTP: give http://HOST:PORT/v1"
        )
    return address, host


def _headers(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    text = str(api_key)
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(
            "api_key has characters that no header has: give printable ASCII"
        )
    return {"authorization": f"Bearer {api_key}"}
