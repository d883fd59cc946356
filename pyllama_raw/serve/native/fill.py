"""`/infill`: prompts of models that fill a gap in a text (fill in the middle)."""

from __future__ import annotations

from pydantic import Field

from pyllama_raw import AsyncEngine
from pyllama_raw.errors import PromptTooLong
from pyllama_raw.serve.body import Exact, Items
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.native.body import NativeBody
from pyllama_raw.serve.service import Service

NEEDED = ("prefix", "suffix", "middle")


class ExtraFile(Exact):
    """A text that helps to fill the gap."""

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

    async def tokens(self, service: Service, engine: AsyncEngine) -> list[list[int]]:
        """
        Those that ask for what is in the gap, with room for it behind them.

        What does not fit is cut: of a prefix its beginning, of a suffix its end, and the first
        ones of the other texts. A suffix may have a quarter of the room.

        Raises:
            Failure: the model has no tokens for this.
        """
        vocab, n_ctx, n_output = engine.info.vocab, engine.n_ctx_slot, self.n_most
        fill = {name: token.token_id for name, token in vocab.fill.items()}
        service.check_texts("input_extra", len(self.input_extra))
        missing = [name for name in NEEDED if name not in fill]
        if missing:
            message = (
                f"the model fills no gaps: it has no token for {', '.join(missing)}"
            )
            raise Failure(501, "unsupported", message, "model")
        if n_output is None:
            n_output = service.config.sampling.get("max_tokens", n_ctx // 4)
        begins = [vocab.bos.token_id] if vocab.adds_bos and vocab.bos else []
        n_free = n_ctx - max(n_output, 1) - len(begins) - len(NEEDED)
        n_free = max(n_free, n_ctx // 2)
        suffix = (await _fitting(engine, self.input_suffix, end=False))[: n_free // 4]
        prefix = await _fitting(engine, self.input_prefix + self.prompt, end=True)
        prefix = prefix[max(len(prefix) - (n_free - len(suffix)), 0) :]
        n_free -= len(prefix) + len(suffix)
        files: list[int] = []
        for each in reversed(self.input_extra):
            tokens = [fill["separator"]] if "separator" in fill else []
            told = f"{each.filename}\n{each.text}\n"
            tokens += await _fitting(engine, told, end=True)
            if len(files) + len(tokens) > n_free:
                break
            files = tokens + files
        middle = [fill["prefix"], *prefix, fill["suffix"], *suffix, fill["middle"]]
        return [begins + files + middle]


async def _fitting(engine: AsyncEngine, text: str, *, end: bool) -> list[int]:
    """Tokens of *text*, or of its *end* or beginning that fits a slot."""
    while text:
        try:
            return await engine.tokenize(text, add_special=False, parse_special=False)
        except PromptTooLong as error:
            n_kept = len(text) * error.n_ctx_slot // (error.n_prompt + 1)
            text = text[len(text) - n_kept :] if end else text[:n_kept]
    return []
