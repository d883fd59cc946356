"""
Pictures of the page for docs/service.md, of the default model under some load:

    python -m scripts.screenshots

It needs Chromium; the font of the pictures is Inter if that is installed.
"""

from __future__ import annotations

from io import BytesIO
from itertools import count
from pathlib import Path

import anyio
from anyio.from_thread import start_blocking_portal
from PIL import Image

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig, SamplingParams
from pyllama_raw.serve import make_app
from scripts.browser import Page, browsing
from tests.serve.support import serving

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
CONFIG = EngineConfig(context=ContextConfig(n_ctx=8192))
SYSTEM = "You answer briefly. You write Markdown, with code where it helps."
QUESTIONS = (
    "How do I count the words of a text in Python? Show a short function.",
    "And how do I sort them by how often they occur?",
)
TOPICS = ("a lighthouse", "the tides", "an old map", "two clocks", "rain on a roof")
N_COLOURS = 128
LIMIT_S = 100
IS_DONE = "!document.body.classList.contains('busy')"


async def load(engine: AsyncEngine) -> None:
    """Ask for stories of several lengths, for ever."""
    async with anyio.create_task_group() as group:
        for place, topic in enumerate(TOPICS):
            group.start_soon(tell, engine, topic, place)


async def tell(engine: AsyncEngine, topic: str, place: int) -> None:
    """Have one story told after the other."""
    for chapter in count():
        story = f"Chapter {chapter} begins by the sea. " * (20 + 45 * place)
        text = f"{story}\nContinue this story. It is about {topic}."
        params = SamplingParams(max_tokens=150 + 60 * place, seed=place, min_tokens=100)
        message = {"role": "user", "content": text}
        async with engine.generate([message], params) as generation:
            await generation.collect()


def talk(page: Page) -> None:
    """Ask both questions, and see the second one being answered."""
    page.until("document.querySelector('#model').value")
    page.click("#open-options")
    page.fill("#options [name=system]", SYSTEM)
    for name, value in (("temperature", "0.2"), ("seed", "4"), ("max_tokens", "260")):
        page.fill(f"#options [name={name}]", value)
    page.click("#options .main")
    for question in QUESTIONS:
        page.until(IS_DONE, LIMIT_S)
        page.fill("#prompt", question)
        page.enter()
    page.until(
        "document.querySelectorAll('.assistant')[1]?.innerText.length > 200", LIMIT_S
    )


def keep(page: Page, name: str) -> None:
    """Write what is seen, in few colours because a file is then small."""
    image = Image.open(BytesIO(page.picture())).convert("RGB")
    path = FOLDER / f"page-{name}.png"
    image.quantize(N_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    """Write all pictures."""
    with start_blocking_portal() as portal:
        manager = portal.wrap_async_context_manager(AsyncEngine.open(config=CONFIG))
        with manager as engine:
            app = make_app({"assistant": engine})
            served = portal.wrap_async_context_manager(serving(app, "asyncio"))
            work = portal.start_task_soon(load, engine)
            with served as url, browsing(url) as page:
                page.size(1440, 900)
                talk(page)
                keep(page, "light")
                page.until(IS_DONE, LIMIT_S)
                page.size(1440, 900, dark=True)
                keep(page, "dark")
                page.size(390, 780, scale=1.5)
                page.value("log.scrollTop = log.scrollHeight")
                page.until("$('brief').textContent.includes('waiting')")
                keep(page, "phone")
            work.cancel()


if __name__ == "__main__":
    main()
