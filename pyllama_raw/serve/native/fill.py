"""`/infill`: prompts of models that fill a gap in a text (fill in the middle)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from pyllama_raw import AsyncEngine
from pyllama_raw.errors import PromptTooLong
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.native.body import NativeBody
from pyllama_raw.serve.service import Service

NEEDED = ("prefix", "suffix", "middle")


class ExtraFile(BaseModel):
    """A text that helps to fill the gap."""

    model_config = ConfigDict(extra="forbid")

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
    input_extra: list[ExtraFile] = Field(default_factory=list)
    """Other texts, the most important one last."""

    async def tokens(self, service: Service, engine: AsyncEngine) -> list[list[int]]:
        """Those that ask for what is in the gap."""
        n_output = self.n_most
        if n_output is None:
            quarter = engine.n_ctx_slot // 4
            n_output = service.config.sampling.get("max_tokens", quarter)
        texts = (self.input_prefix + self.prompt, self.input_suffix)
        return [await _fill_prompt(engine, texts, self.input_extra, n_output)]


async def _fill_prompt(
    engine: AsyncEngine,
    texts: tuple[str, str],
    extra: list[ExtraFile],
    n_output: int,
) -> list[int]:
    """
    Tokens of the gap between *texts*, with *n_output* tokens of room behind them.

    What does not fit is cut: of a prefix its beginning, of a suffix its end, and the first
    ones of *extra*. A suffix may have a quarter of the room.

    Raises:
        Failure: the model has no tokens for this.
    """
    vocab = engine.info.vocab
    fill = {name: token.token_id for name, token in vocab.fill.items()}
    missing = [name for name in NEEDED if name not in fill]
    if missing:
        message = f"the model fills no gaps: it has no token for {', '.join(missing)}"
        raise Failure(501, "unsupported", message, "model")
    begins = [vocab.bos.token_id] if vocab.adds_bos and vocab.bos is not None else []
    n_free = engine.n_ctx_slot - max(n_output, 1) - len(begins) - len(NEEDED)
    n_free = max(n_free, engine.n_ctx_slot // 2)
    suffix = (await _fitting(engine, texts[1], end=False))[: n_free // 4]
    prefix = await _fitting(engine, texts[0], end=True)
    prefix = prefix[max(len(prefix) - (n_free - len(suffix)), 0) :]
    n_free -= len(prefix) + len(suffix)
    files: list[int] = []
    for each in reversed(extra):
        tokens = [fill["separator"]] if "separator" in fill else []
        tokens += await _fitting(engine, f"{each.filename}\n{each.text}\n", end=True)
        if len(files) + len(tokens) > n_free:
            break
        files = tokens + files
    middle = [fill["prefix"], *prefix, fill["suffix"], *suffix, fill["middle"]]
    return begins + files + middle


async def _fitting(engine: AsyncEngine, text: str, *, end: bool) -> list[int]:
    """Tokens of *text*, or of its *end* or beginning that fits a slot."""
    while text:
        try:
            return await engine.tokenize(text, add_special=False, parse_special=False)
        except PromptTooLong as error:
            n_kept = len(text) * error.n_ctx_slot // (error.n_prompt + 1)
            text = text[len(text) - n_kept :] if end else text[:n_kept]
    return []
