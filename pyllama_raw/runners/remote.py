"""
A service over HTTP as a runner: any that has OpenAI's API; needs the extra `runners`.

Order of a request: a turn by the limits, then tries; each try passes the breaker and has its
limits of time. A service that hangs is not asked again after the first delta.
"""

from __future__ import annotations

import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from urllib.parse import urlsplit

from anyio import CancelScope, move_on_after

from pyllama_raw import Prompt
from pyllama_raw.errors import ClosedError, ConfigError
from pyllama_raw.options.requests import RequestOptions, TextOptions
from pyllama_raw.options.sampling import SamplingParams
from pyllama_raw.runners.answer import ServiceAnswer
from pyllama_raw.runners.breaker import Breaker
from pyllama_raw.runners.capabilities import Verb
from pyllama_raw.runners.connection import event_data, http_library, refusal
from pyllama_raw.runners.dialect import COMPATIBLE, Dialect
from pyllama_raw.runners.errors import NetworkError, RunnerTimeout, UnexpectedAnswer
from pyllama_raw.runners.limits import Limits, Turnstile
from pyllama_raw.runners.prices import Prices
from pyllama_raw.runners.run import Source
from pyllama_raw.runners.runner import ModelRunner, RunnerHealth
from pyllama_raw.runners.tries import Backoff, RetryBudget, Timeouts, retried, timed

if TYPE_CHECKING:
    import httpx2

    from pyllama_raw.results import Ranked, Vectors

T = TypeVar("T")
WRONG = (  # what reading an answer of any shape may raise, and httpx2 does not
    *(ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError),
)
CHARACTERS_A_TOKEN = 4  # of a prompt whose tokens nobody has counted


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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"url={url!r} is no address of HTTP: give http://HOST:PORT/v1"
            )
        super().__init__(
            name or f"{model} at {parts.hostname}",
            dialect.capabilities.only(verbs),
            prices,
        )
        self._url = url.rstrip("/") + ("/v1" if parts.path in ("", "/") else "")
        self._model, self._dialect = model, dialect
        self._timeouts, self._breaker = timeouts or Timeouts(), breaker or Breaker()
        self._retries = RetryBudget(backoff or Backoff())
        self.limits = limits or Limits()
        self._gate = Turnstile(self.limits)
        http = http_library()
        self._client: httpx2.AsyncClient = http.AsyncClient(
            base_url=f"{self._url}/",
            timeout=http.Timeout(None, connect=self._timeouts.connect_s),
            transport=transport,
        )
        self._headers = _headers(api_key)

    async def rebuild(self, api_key: str | None) -> None:
        """Use another key for new requests; those under way keep the old one."""
        self._headers = _headers(api_key)

    async def health(self) -> RunnerHealth:
        """The answer of `/health` within `Timeouts.health_s`, or `/models` if there is none."""
        import httpx2

        if self._closed:
            return RunnerHealth(live=False, ready=False, detail="closed")
        limit_s, status = self._timeouts.health_s, 0
        said = f"no answer within {limit_s:g} s"
        get = partial(self._client.get, headers=self._headers)
        with move_on_after(limit_s):
            try:
                response = await get(f"{self._url.removesuffix('/v1')}/health")
                if response.status_code == 404:
                    response = await get("models")
                status = response.status_code
                said = f"status {status}"
            except httpx2.HTTPError as error:
                said = str(error) or type(error).__name__
        ready = status == 200 and self._breaker.state != "open"
        live = 0 < status < 500 or status == 503
        return RunnerHealth(live, ready, self.n_open, detail=said)

    async def embed(
        self, texts: Iterable[str | Sequence[int]], **options: Unpack[TextOptions]
    ) -> Vectors:
        """A vector for each text, as the service makes it."""
        import numpy as np

        from pyllama_raw.api.vectors import vectors_of

        asked = {"input": list(texts), **options}
        told = await self._whole("embed", "embeddings", asked)
        with _reading("embeddings"):
            ordered = sorted(told["data"], key=lambda each: each["index"])
            rows = np.array([each["embedding"] for each in ordered], np.float32)
            n_tokens = int((told.get("usage") or {}).get("prompt_tokens") or 0)
        return vectors_of(rows, n_tokens, normalize=False)

    async def rank(
        self, query: str, documents: Iterable[str], **options: Unpack[TextOptions]
    ) -> list[Ranked]:
        """*documents*, the best first."""
        from pyllama_raw.results import Ranked

        asked = {"query": query, "documents": list(documents), **options}
        told = await self._whole("rank", "rerank", asked)
        with _reading("rerank"):
            found = [
                Ranked(each["index"], score, {"0": score}, 0)
                for each in told["results"]
                for score in [float(each["relevance_score"])]
            ]
        return sorted(found, key=lambda one: -one.score)

    async def aclose(self) -> None:
        """Close the connections; requests under way end with ClosedError."""
        self._closed = True
        with CancelScope(shield=True):
            await self._client.aclose()

    # -- inside ---------------------------------------------------------------

    def _source(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> Source:
        path, body = self._dialect.request(self._model, prompt, params, options)
        n_most = params.n * params.max_tokens
        return self._tried(partial(self._streamed, path, body, params), body, n_most)

    async def _streamed(
        self, path: str, body: dict[str, Any], params: SamplingParams
    ) -> Source:
        """One try of a stream."""
        answer = ServiceAnswer(params.n, self._dialect.reasoning, params.seed)
        async with self._answer(path, body) as response:
            yield None
            async with aclosing(event_data(response)) as events:
                with _reading("a stream"):
                    async for data in events:
                        for delta in answer.take(json.loads(data)):
                            yield delta
        for result in answer.results():
            yield result

    async def _whole(self, verb: Verb, path: str, fields: dict[str, Any]) -> Any:
        """The answer at once to a request that has no stream."""
        self.capabilities.check_verb(verb)
        self._check_open()
        body = {"model": self._model, **fields}
        tries = self._tried(partial(self._once, path, body), body)
        [answer] = [each async for each in tries]
        return answer

    async def _once(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """One try of an answer at once."""
        async with self._answer(path, body) as response:
            text = await response.aread()
        with _reading(path):
            yield json.loads(text)

    async def _tried(
        self,
        make: Callable[[], AsyncGenerator[T, None]],
        body: dict[str, Any],
        n_most: int = 0,
    ) -> AsyncGenerator[T, None]:
        """Items that *make* gives, by all rules of this runner; *n_most* tokens of output."""
        n_tokens = len(json.dumps(body)) // CHARACTERS_A_TOKEN + n_most

        tries = retried(
            lambda: timed(make(), self._timeouts),
            self._retries.wait_s,
            self._breaker.watching,
        )
        async with self._gate.entered(n_tokens), aclosing(tries) as source:
            self._retries.earn()
            async for item in source:
                yield item

    @asynccontextmanager
    async def _answer(
        self, path: str, body: dict[str, Any]
    ) -> AsyncIterator[httpx2.Response]:
        """An answer that begins well; errors of HTTP become ours."""
        import httpx2

        self._check_open()
        try:
            async with self._client.stream(
                "POST", path, json=body, headers=self._headers
            ) as response:
                self._gate.told(response.headers)
                if response.status_code != 200:
                    raise await refusal(response)
                yield response
        except httpx2.ConnectTimeout as error:
            raise RunnerTimeout("connect", self._timeouts.connect_s or 0) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if self._closed:
                raise ClosedError(f"{self!r}: it was closed meanwhile") from error
            said = f"{self.name}: {str(error) or type(error).__name__}"
            raise NetworkError(said) from error


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn what a wrong answer raises while it is read into UnexpectedAnswer."""
    try:
        yield
    except WRONG as error:
        said = f"{what}: the service answered what its API does not have"
        raise UnexpectedAnswer(said) from error
