"""
The dialect of llama.cpp's server: `/completion`, and `/infill`, which fills a gap in a text.

In: NativeCompletionBody and InfillBody. Meaning: read_completion() and read_infill(). Out:
NativeCodec, and settings(), which tells parameters in the words of this dialect.

Defaults are those of the service, then those of SamplingParams, but for the tokens: the rest of
the context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from math import exp, inf, isfinite
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.responses import Response

from pyllama_raw import AsyncEngine, Delta, FinishReason, Result, SamplingParams
from pyllama_raw.errors import PromptTooLong
from pyllama_raw.results import LengthLimit, Operation, StopString, TokenLogprobs
from pyllama_raw.serve import fields
from pyllama_raw.serve.answer import (
    STREAMED,
    LineLimits,
    PromptText,
    TextAnswer,
    TextRequest,
    event,
    timings,
)
from pyllama_raw.serve.body import (
    NO_LIMIT,
    SAMPLED,
    STAGES,
    Exact,
    Items,
    Named,
    TextBody,
    adapted,
    checked_params,
)
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.media import raw_parts
from pyllama_raw.serve.service import ServedModel, Service

NAMES = {  # fields of llama.cpp's server, and those of SamplingParams
    "n_predict": "max_tokens", "n_cmpl": "n", "n_probs": "logprobs",
    "repeat_last_n": "penalty_last_n", "dry_penalty_last_n": "dry_last_n",
    "samplers": "stages",
}  # fmt: skip
SAME = {"top_n_sigma", "adaptive_target"}
OURS = {ours: theirs for theirs, ours in NAMES.items()}
MEDIA = "prompt.multimodal_data"
GAP = ("prefix", "suffix", "middle")
# Names of llama-server where a request has none, which models have seen.
REPO, FILE, SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
NO_SLOT = -1  # the engine may move a request while it runs
MAX_TEXT_BIASES = 1000  # each of them becomes tokens first

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Last = Annotated[int, Field(ge=-1)]  # tokens; -1: all
Bias = float | Literal[False]  # False: never
Pair = Annotated[tuple[TokenId | str, Bias], Field(strict=False)]  # JSON has only lists
Biases = Named[Bias] | Items[Pair]


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/completion", tags=["native"], responses=STREAMED)
    @app.post("/completions", include_in_schema=False)
    async def completion(body: NativeCompletionBody) -> Response:
        """Go on with prompts, in the words of llama.cpp's server."""
        request = await read_completion(body, service)
        codec = NativeCodec(request, body, await request.texts())
        return TextAnswer(service, request, codec)

    @app.post("/infill", tags=["native"], responses=STREAMED)
    async def infill(body: InfillBody) -> Response:
        """Fill a gap in a text, with a model that has learnt it."""
        request = await read_infill(body, service)
        codec = NativeCodec(request, body, await request.texts())
        return TextAnswer(service, request, codec)


# -- in ----------------------------------------------------------------------------------


class PromptString(Exact):
    """A text as an object, with images and sounds in the places of its markers."""

    prompt_string: str
    multimodal_data: Items[str] = Field(default_factory=list)
    """Images and sounds in base64, one for each `<__media__>` of the text."""

    @property
    def text(self) -> str:
        """What stands in a list for it. Raises Failure if there is more than text."""
        if self.multimodal_data:
            reason = (
                "images and sounds are no text: give /completion a prompt of its own"
            )
            raise refused(MEDIA, reason, "unsupported")
        return self.prompt_string


class PromptPart(Exact):
    """A piece of a text."""

    type: Literal["text"]
    text: str


class PromptParts(Exact):
    """A text in parts, as of a message of a chat."""

    content: Annotated[list[PromptPart], Field(min_length=1, fail_fast=True)]

    @property
    def text(self) -> str:
        """All parts, one behind the other."""
        return "".join(part.text for part in self.content)


Mixed = Items[TokenId | str]  # of one prompt
TextObject = PromptString | PromptParts
Prompts = str | TextObject | Items[TokenId | str | TextObject | Mixed]


class NativeBody(TextBody):
    """The fields of all bodies of llama.cpp's server that ask for text."""

    rules: ClassVar[fields.Rules] = fields.COMPLETIONS

    n_predict: Last | None = None
    """Most tokens of an output; -1: what is left of the context, 0: only the prompt."""
    n_cmpl: Annotated[int, Field(ge=1, le=256)] | None = None
    """Outputs of each prompt."""
    post_sampling_probs: bool = False
    """Whether they have their probabilities after all samplers."""
    repeat_last_n: Last | None = None
    dry_penalty_last_n: Last | None = None
    top_n_sigma: float | None = None
    adaptive_target: float | None = None
    logit_bias: Biases | None = None  # type: ignore[assignment]
    """Numbers added to logits, by token id or by text, which stands for all its tokens."""
    grammar: str | dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    """A schema; a grammar beside it wins."""

    cache_prompt: bool = True
    """Whether earlier requests may save work of this one."""
    return_tokens: bool = False
    """Whether a whole answer has its token ids; events always have."""
    n_indent: Annotated[int, Field(ge=0)] = 0
    """Blanks that each line behind the first has at least; a line with fewer ends the output."""
    t_max_predict_ms: Annotated[int, Field(ge=-1)] = -1
    """Milliseconds after which the next end of a line is that of the output; 0 or -1: any."""
    response_fields: Items[str] = Field(default_factory=list)
    """The only fields of the answer, such as `generation_settings/n_predict`."""

    @property
    def n_most(self) -> int | None:
        """Most tokens of an output; None: what is left of the context."""
        n_predict = self.max_tokens if self.n_predict is None else self.n_predict
        return None if n_predict in NO_LIMIT else n_predict

    def model_post_init(self, context: Any) -> None:  # noqa: ARG002
        """Leave out the schema beside a grammar, which wins."""
        if self.grammar:
            self.json_schema = None


class NativeCompletionBody(NativeBody):
    """Prompts that are to go on."""

    prompt: Prompts
    """A text, token ids, both mixed, or a list of these."""


class ExtraFile(BaseModel):
    """A text that helps to fill the gap; editors send more with it, such as its time."""

    text: str
    filename: str = "tmp"


class InfillBody(NativeBody):
    """A gap in a text that is to be filled."""

    input_prefix: str
    """The text before the gap."""
    input_suffix: str
    """The text behind it."""
    prompt: str = ""
    """The text that the gap begins with."""
    input_extra: Items[ExtraFile] = Field(default_factory=list)
    """Other texts, the most important one last."""


# -- meaning -----------------------------------------------------------------------------


async def read_completion(body: NativeCompletionBody, service: Service) -> TextRequest:
    """The request of *body*. Raises Failure and InvalidRequest."""
    model = service.find(body.model, Operation.GENERATE)
    # Of a list without token ids, each item is a prompt.
    prompts = prompts_of(body.prompt)
    service.check_outputs(model, len(prompts), body.n_cmpl or body.n)
    service.check_texts("prompt", n_texts(prompts))
    read: list[list[Any]] = []
    n_media = 0  # at most, of one prompt
    for prompt in prompts:
        data = prompt.multimodal_data if isinstance(prompt, PromptString) else ()
        # Images and sounds stand between texts; all other prompts are token ids.
        if data:
            text = prompt.prompt_string
            read.append(await raw_parts(text, data, MEDIA, model.engine))
            n_media = max(n_media, len(data))
        else:
            read.append(await tokens_of(model.engine, prompt))
    request = await _request(body, model, service, read)
    # An error tells which medium of its prompt is at fault.
    request.media.extend(f"{MEDIA}[{index}]" for index in range(n_media))
    return request


async def read_infill(body: InfillBody, service: Service) -> TextRequest:
    """
    The request of *body*: the tokens that ask for the text in the gap, with room behind them.

    Its form is that of llama-server: the names of a repository and of files, as far as the model
    has tokens for them. What does not fit is cut: of a prefix its beginning, of a suffix its end,
    and the first ones of the other texts. A suffix may have a quarter of the room.

    Raises:
        Failure: the model has no tokens for this.
    """
    model = service.find(body.model, Operation.GENERATE)
    service.check_outputs(model, 1, body.n_cmpl or body.n)
    engine = model.engine
    vocab, n_ctx, n_output = engine.info.vocab, engine.n_ctx_slot, body.n_most
    fill = {name: token.token_id for name, token in vocab.fill.items()}
    service.check_texts("input_extra", len(body.input_extra))
    missing = [name for name in GAP if name not in fill]
    if missing:
        message = f"the model fills no gaps: it has no token for {', '.join(missing)}"
        raise Failure(501, "unsupported", message, "model")
    if n_output is None:
        n_output = service.sampling.get("max_tokens", n_ctx // 4)
    begins = [vocab.bos.token_id] if vocab.adds_bos and vocab.bos else []
    # Names of the repository and of the file that the gap is in.
    names: list[list[int]] = []
    for kind, text in (("repo", REPO), ("separator", FILE)):
        tokens = await _fitting(engine, text, end=True) if kind in fill else []
        names.append([fill[kind], *tokens] if kind in fill else [])
    repository, own_file = names
    n_names = len(repository) + len(own_file)
    n_free = n_ctx - max(n_output, 1) - len(begins) - len(GAP) - n_names
    n_free = max(n_free, n_ctx // 2)
    suffix = (await _fitting(engine, body.input_suffix, end=False))[: n_free // 4]
    prefix = await _fitting(engine, body.input_prefix + body.prompt, end=True)
    prefix = prefix[max(len(prefix) - (n_free - len(suffix)), 0) :]
    n_free -= len(prefix) + len(suffix)
    # The last of the other texts is the most important one.
    files: list[int] = []
    for file in reversed(body.input_extra):
        tokens, head = [], SNIPPET
        if "separator" in fill:
            tokens, head = [fill["separator"]], f"{file.filename}\n"
        tokens += await _fitting(engine, head, end=True)
        tokens += await _fitting(engine, file.text, end=True)
        if len(files) + len(tokens) > n_free:
            break
        files = tokens + files
    files = repository + files + own_file
    before = [fill["prefix"], *prefix]
    behind = [fill["suffix"], *suffix]
    gap = behind + before if service.config.suffix_first else before + behind
    return await _request(
        body, model, service, [[*begins, *files, *gap, fill["middle"]]]
    )


async def _fitting(engine: AsyncEngine, text: str, *, end: bool) -> list[int]:
    """Tokens of *text*, or of its *end* or beginning that fits a slot."""
    while text:
        try:
            return await engine.tokenize(text, add_special=False, parse_special=False)
        except PromptTooLong as error:
            n_most = len(text) * error.n_ctx_slot // (error.n_prompt + 1)
            text = text[len(text) - n_most :] if end else text[:n_most]
    return []


async def _request(
    body: NativeBody, model: ServedModel, service: Service, prompts: Sequence[Any]
) -> TextRequest:
    """The request of *body* with tokens or parts of each prompt. Raises Failure and InvalidRequest."""
    names = OURS | dict(body.form.names)
    biases = await _biases(body, model, service)
    reading = partial(_params, body, model, service, biases, names)
    params = await service.read_body(reading)
    options = body.options(model, service)
    # No other request has this salt.
    if not body.cache_prompt:
        options["cache_salt"] = f"{options.get('cache_salt') or ''}{uuid4().hex}"
    streams = bool(body.stream)
    lines = None
    if body.n_indent or body.t_max_predict_ms > 0:
        limit_s = body.t_max_predict_ms / 1e3 if body.t_max_predict_ms > 0 else inf
        lines = LineLimits(body.n_indent, limit_s)
    return TextRequest(
        model, tuple(prompts), params, options, streams, names, lines=lines
    )


def _params(
    body: NativeBody,
    model: ServedModel,
    service: Service,
    biases: dict[str, Any],
    names: dict[str, str],
) -> SamplingParams:
    """The parameters of the outputs. Raises Failure."""
    included = {*NAMES} | SAME | SAMPLED
    theirs = body.model_dump(include=included, exclude_none=True)
    n_ctx = model.engine.n_ctx_slot
    values = {"max_tokens": n_ctx} | service.sampling | body.unnamed
    values |= {NAMES.get(name, name): value for name, value in theirs.items()}
    values = {**adapted(values, n_ctx), **body.form.params}
    # The engine makes one token at least; the codec leaves it out.
    values["max_tokens"] = max(values["max_tokens"], 1)
    if body.post_sampling_probs:
        values["logprobs_of"] = "sampler"
    if body.samplers is not None:
        values["stages"] = [STAGES.get(name, name) for name in body.samplers]
    if values.get("logprobs") == 0:  # llama.cpp's word for none
        del values["logprobs"]
    return checked_params(values | biases, names)


async def _biases(
    body: NativeBody, model: ServedModel, service: Service
) -> dict[str, Any]:
    """Fields of SamplingParams for `logit_bias`, whose names may be texts. Raises Failure."""
    if body.logit_bias is None:
        return {}
    by_id = isinstance(body.logit_bias, dict)  # its names may be token ids
    pairs: Any = body.logit_bias.items() if by_id else body.logit_bias  # type: ignore[union-attr]

    def is_id(key: int | str) -> bool:
        return isinstance(key, int) or (by_id and key.isdecimal() and len(key) < 11)

    def texts() -> list[str]:
        return [str(key) for key, _ in pairs if not is_id(key)]

    def biases() -> dict[str, Any]:
        by_token: dict[int, float] = {}
        never: set[int] = set()
        for key, bias in pairs:
            ids = [int(key)] if is_id(key) else tokens[str(key)]
            if bias is False:
                never.update(ids)
            else:
                by_token |= dict.fromkeys(ids, bias)
        suppressed = {"suppress_tokens": [*never]} if never else {}
        return {"logit_bias": by_token, **suppressed}

    names = await service.read_body(texts)
    if len(names) > MAX_TEXT_BIASES:
        reason = f"at most {MAX_TEXT_BIASES} names are texts: give token ids"
        raise refused("logit_bias", reason)
    tokenize = model.engine.tokenize
    tokens = {name: await tokenize(name, add_special=False) for name in names}
    return await service.read_body(biases)


def prompts_of(prompts: Prompts, name: str = "prompt") -> list[Any]:
    """All of *prompts*. Raises Failure if there is none in the field *name*."""
    if not isinstance(prompts, list) or any(isinstance(item, int) for item in prompts):
        return [prompts]
    if not prompts:
        raise refused(name, "give at least one")
    return prompts


def n_texts(prompts: Sequence[Any]) -> int:
    """The texts of *prompts*, each of which is tokenized alone; token ids together are one."""
    n_items = 0
    for prompt in prompts:
        texts = isinstance(prompt, list) and sum(not isinstance(i, int) for i in prompt)
        n_items += max(int(texts), 1)
    return n_items


async def tokens_of(engine: AsyncEngine, prompt: object) -> list[int]:
    """The tokens of *prompt*; a text at its beginning gets those that begin prompts."""
    tokens: list[int] = []
    for index, item in enumerate(prompt if isinstance(prompt, list) else [prompt]):
        if isinstance(item, int):
            tokens.append(item)
            continue
        text = item.text if isinstance(item, TextObject) else item
        if not isinstance(text, str):
            raise refused("prompt", "a list with token ids may have texts beside them")
        tokens += await engine.tokenize(text, add_special=index == 0)
    return tokens


# -- out ---------------------------------------------------------------------------------


class NativeCodec:
    """Writes the answer to one or more prompts; output *index* counts through all."""

    blocks = None

    def __init__(
        self, request: TextRequest, body: NativeBody, texts: Sequence[PromptText]
    ) -> None:
        self._request, self._body = request, body
        self._texts = texts  # of the prompts
        self._has_output = body.n_most != 0
        self._n_predicted: defaultdict[int, int] = defaultdict(int)

    def begin(self, n_prompt: int) -> bytes:  # noqa: ARG002
        """Nothing: the first text says all."""
        return b""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """The new text; with probabilities each token has an event of its own."""
        if not self._has_output:
            return b""
        index, frames = prompt * self._request.params.n + delta.index, []
        groups = [delta.token_ids]
        if len(delta.logprobs) > 1:
            groups = [(token,) for token in delta.token_ids]
        for at, tokens in enumerate(groups):
            self._n_predicted[index] += len(tokens)
            fields: dict[str, Any] = {
                "index": index,
                "content": delta.text if at == len(groups) - 1 else "",
                "tokens": tokens,
                "stop": False,
                "id_slot": NO_SLOT,
                "tokens_predicted": self._n_predicted[index],
                "tokens_evaluated": self._texts[prompt].n_tokens,
            }
            entries = delta.logprobs[at : at + len(tokens)]
            frames.append(event(fields | self._probabilities(entries)))
        return b"".join(frames)

    def ended(self, prompt: int, result: Result) -> bytes:
        """All but the text, which was told."""
        fields = self._fields(prompt, result) | {"content": "", "tokens": []}
        fields.pop("completion_probabilities", None)
        return event(self._selected(fields))

    def failed(self, failure: Failure) -> bytes:
        """An error after the answer began."""
        return event(failure.body())

    def done(self, results: Sequence[Sequence[Result]]) -> bytes:  # noqa: ARG002
        """Nothing: each output ends by itself."""
        return b""

    def whole(self, results: Sequence[Sequence[Result]]) -> Any:
        """An object, or a list of them if there is more than one output."""
        outputs = [
            self._selected(self._fields(prompt, result))
            for prompt, of_prompt in enumerate(results)
            for result in of_prompt
        ]
        return outputs[0] if len(outputs) == 1 else outputs

    def _fields(self, prompt: int, result: Result) -> dict[str, Any]:
        text, tokens = result.text, result.token_ids
        if not self._has_output:
            text, tokens = "", ()
        stop, n_prompt = result.finish_detail, result.usage.prompt_tokens
        request, engine = self._request, self._request.model.engine
        n_ctx = engine.n_ctx_slot
        used = settings(request.params, engine) | {"stream": request.streams}
        used["lora"] = dict(request.options.get("adapters") or {})
        fields: dict[str, Any] = {
            "index": prompt * request.params.n + result.index,
            "content": text,
            "tokens": tokens if self._body.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": request.model.name,
            "tokens_predicted": len(tokens),
            "tokens_evaluated": n_prompt,
            "tokens_cached": result.usage.cached_tokens,
            "generation_settings": used,
            "prompt": self._texts[prompt].text,
            "has_new_line": "\n" in text,
            "truncated": stop is LengthLimit.SLOT or n_prompt + len(tokens) > n_ctx,
            "stop_type": _stop_type(result),
            "stopping_word": stop.text if isinstance(stop, StopString) else "",
            "timings": timings(result, len(tokens)),
        }
        return fields | self._probabilities(result.logprobs)

    def _probabilities(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not entries:  # also those of the token that is made where none is asked for
            return {}
        is_post = self._request.params.logprobs_of == "sampler"
        name = "top_probs" if is_post else "top_logprobs"
        listed = []
        for entry in entries:
            pairs = zip(entry.top, entry.top_pieces, strict=True)
            top = [
                _token(token_id, logprob, piece, is_post)
                for (token_id, logprob), piece in pairs
                if isfinite(logprob)  # others cannot come
            ]
            token = _token(entry.token_id, entry.logprob, entry.piece, is_post)
            listed.append(token | {name: top})
        return {"completion_probabilities": listed}

    def _selected(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Those of *fields* that the body names, or all."""
        names = self._body.response_fields
        return {n: v for n in names for v in _field(fields, n)} if names else fields


def _stop_type(result: Result) -> str:
    if result.finish_reason is not FinishReason.STOP:
        return "limit"
    return "word" if isinstance(result.finish_detail, StopString) else "eos"


def _token(token: int, logprob: float, piece: bytes, is_post: bool) -> dict[str, Any]:
    text = piece.decode(errors="ignore")
    value = {"prob": exp(logprob)} if is_post else {"logprob": logprob}
    return {"id": token, "token": text, "bytes": list(piece), **value}


def _field(fields: dict[str, Any], name: str) -> Iterable[Any]:
    """The field, if there is one; a slash leads into an inner object."""
    value: Any = fields
    for part in name.split("/"):
        if not isinstance(value, dict) or part not in value:
            return
        value = value[part]
    yield value


def settings(params: SamplingParams, engine: AsyncEngine) -> dict[str, Any]:
    """*params* in the words of llama.cpp's server."""
    eos = engine.info.vocab.eos
    values = params.model_dump()
    values |= {theirs: values.pop(ours) for ours, theirs in OURS.items()}
    theirs = {ours: theirs for theirs, ours in STAGES.items()}
    never = [*params.suppress_tokens]
    never += [eos.token_id] if params.ignore_eos and eos is not None else []
    biases = [*params.logit_bias.items(), *((token, None) for token in never)]
    for name in ("repeat_last_n", "dry_penalty_last_n", "seed", "adaptive_target"):
        values[name] = -1 if values[name] is None else values[name]
    return values | {
        "max_tokens": params.max_tokens,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases],
        "samplers": [theirs.get(stage, stage) for stage in params.stages],
        "post_sampling_probs": params.logprobs_of == "sampler",
    }
