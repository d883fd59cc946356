"""The page at `/` in a real browser, and how it is served."""

import base64
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Semaphore
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from starlette.responses import JSONResponse

from pyllama_raw import AsyncEngine, EngineConfig, MediaConfig
from pyllama_raw.results import EngineState
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.page import HTML
from pyllama_raw.testing import EOS, FakeExecutor, fake_engine, fake_limits
from scripts.browser import PROGRAM, Page, browsing
from tests.media.files import image_file
from tests.serve.support import serving
from tests.support.limits import LIMIT_S
from tests.support.replying import reply_engine
from tests.support.tiny import tiny_projector

has_none = pytest.mark.skipif(PROGRAM is None, reason="apt-get install chromium")

ROOM = fake_limits(n_ctx_slot=4096, n_batch=512, n_cells=16384)
ASKED = "\x02"  # ends a prompt
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}" + ASKED
KEY = "a-key"
IS_DONE = "turns.length && !document.body.classList.contains('busy')"
MARKDOWN = """# One *title*

Some **bold** and `code` and 2 * 3 * 4,
on two lines.

- a
- b
  1. deeper
  2. still

> said

```python
print("<b>")
```
<img src=x onerror=document.title='hacked'> [there](javascript:alert(1))"""


def in_browser(test: Any) -> Any:
    """A test that needs Chromium."""
    return pytest.mark.nightly(has_none(test))


def test_the_dot_is_red_only_for_an_engine_that_has_ended():
    """
    The page has a class for each other state.
    """
    table = re.search(r"STATE_CLASSES = \{(.*?)\}", HTML, re.DOTALL)

    assert table is not None
    states = re.findall(r"(\w+):", table[1])
    assert sorted(states) == sorted(s for s in EngineState if not s.has_ended)


def spelling(text: str, **options: Any) -> FakeExecutor:
    """An executor whose outputs are *text*."""
    answer = [*text.encode(), EOS]

    def next_token(seen: Any) -> int:
        n_prompt = len(seen) - seen[::-1].index(ord(ASKED))
        return answer[len(seen) - n_prompt]

    return FakeExecutor(ROOM, next_token=next_token, **options)


def waiting_for(steps: Semaphore) -> Any:
    """Lets a step begin for each release; a test that fails ends all the same."""
    return lambda *_: steps.acquire(timeout=LIMIT_S)


def chatting(executor: FakeExecutor, **options: Any) -> AsyncEngine:
    return fake_engine(executor, chat_template=TEMPLATE, **options)


@contextmanager
def served(engine: Any, wrap: Any = lambda app: app, **config: Any) -> Iterator[str]:
    """The address of a server of *engine*, in a thread of its own."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(engine) as opened,
    ):
        app = wrap(make_app({"a": opened}, ServeConfig(**config)))
        with portal.wrap_async_context_manager(serving(app, "asyncio")) as url:
            yield url


@contextmanager
def page_of(engine: Any, wrap: Any = lambda app: app, **config: Any) -> Iterator[Page]:
    """The page, once it knows its models."""
    with served(engine, wrap, **config) as url, browsing(url) as page:
        page.until(
            "document.querySelector('#model').value || document.querySelector('dialog[open]')"
        )
        yield page


def say(page: Page, text: str) -> None:
    """Send a message."""
    page.fill("#prompt", text)
    page.enter()


def ask(page: Page, text: str) -> str:
    """The answer to a message."""
    say(page, text)
    page.until(IS_DONE)
    return page.value("turns.at(-1).text")


def hosts(page: Page) -> set[str]:
    """All hosts that were asked for something."""
    urls = [request["url"] for request in page.requests]
    return {"/".join(u.split("/")[:3]) for u in urls if not u.startswith("data:")}


def test_the_page_needs_no_key_and_allows_nothing_of_others():
    """
    Its policy names its own script and style by their hashes, and only this host.
    """
    with served(chatting(spelling("a"))) as url:
        answer = httpx.get(url, timeout=LIMIT_S)
        head = httpx.head(url)
    policy = dict(
        part.split(" ", 1)
        for part in answer.headers["content-security-policy"].split("; ")
    )

    assert (answer.status_code, head.status_code) == (200, 200)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert policy["style-src"].startswith("'sha256-")
    assert not re.search(r"(src|href|action)=.?(https?:|//)", answer.text)


@in_browser
def test_a_chat_streams_and_is_that_of_the_api():
    """
    Each token is shown while the next one is awaited; nothing goes to another host, and
    nothing goes wrong.
    """
    steps = Semaphore(0)
    executor = spelling("one two three", on_step=waiting_for(steps))
    with page_of(chatting(executor)) as page:
        say(page, "count")
        steps.release(3)
        page.until("turns[1]?.body.innerText.length === 3")
        partial = page.value("turns[1].body.innerText")
        is_busy = page.value("document.body.classList.contains('busy')")
        steps.release(100)
        page.until(IS_DONE)
        text, facts = page.text(".assistant .body"), page.text(".facts")
        url = page.value("location.origin")
        body = page.posted("/v1/chat/completions")[0]
        at_once = body | {"stream": False, "stream_options": None}
        whole = httpx.post(
            f"{url}/v1/chat/completions", json=at_once, timeout=LIMIT_S
        ).json()

    assert (partial, is_busy) == ("one", True)
    assert text == whole["choices"][0]["message"]["content"] == "one two three"
    assert "14 tokens" in facts
    assert "of 7 prompt tokens cached" in facts
    assert hosts(page) == {url}
    assert page.errors == []


@in_browser
@pytest.mark.parametrize("by", ["key", "button"])
def test_stopping_ends_the_request_within_a_step(by):
    """
    By Escape or by the button; the text that came stays, and the next message is answered.
    """
    steps = Semaphore(0)
    executor = spelling("a" * 1000, on_step=waiting_for(steps))
    with page_of(chatting(executor)) as page:
        say(page, "go")
        steps.release(3)
        page.until("turns[1]?.body.innerText === 'aaa'")
        page.press("Escape", 27) if by == "key" else page.click("#stop")
        page.until(IS_DONE)
        steps.release()
        page.until("$('running').textContent === '0 of 4'")
        n_steps, facts = executor.n_steps, page.text(".facts")
        steps.release(10_000)
        say(page, "and now?")
        page.until("turns[3]?.text")

    assert n_steps <= 5
    assert "stopped" in facts
    assert page.errors == []


@in_browser
def test_options_and_turns_reach_the_request():
    """
    Those that are set, under the API's names; the system message comes first.
    """
    with page_of(chatting(spelling("yes"))) as page:
        ask(page, "first")
        page.click("#open-options")
        given = {
            "system": "be brief",
            "temperature": "0.5",
            "top_p": "0.9",
            "top_k": "40",
            "min_p": "0.05",
            "max_tokens": "2",
            "seed": "7",
            "stop": "END\n\\n\\n",
        }
        for name, value in given.items():
            page.fill(f"#options [name={name}]", value)
        page.press("Escape", 27)
        page.until("!$('options').open")
        ask(page, "second")
        facts, n_set = page.text(".facts"), page.text("#n-options")
        plain, full = page.posted("/v1/chat/completions")

    assert set(plain) == {"model", "messages", "stream", "stream_options"}
    assert full == plain | {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 2,
        "seed": 7,
        "stop": ["END", "\n\n"],
    }
    assert "token limit" in facts
    assert n_set == "8"


@in_browser
def test_the_last_message_is_edited_and_answered_again():
    """
    What came after it goes; Shift+Enter begins a line; a new chat begins with nothing.
    """
    with page_of(chatting(spelling("yes"))) as page:
        ask(page, "one")
        ask(page, "two")
        page.click(".edit")
        before = page.value("$('prompt').value")
        page.fill("#prompt", "three")
        page.enter(shift=True)
        page.call("Input.insertText", text="four")
        page.enter()
        page.until(IS_DONE)
        page.click(".again")
        page.until(IS_DONE + " && turns.length === 4")
        edited, again = page.posted("/v1/chat/completions")[2:]
        page.click("#new")
        left = page.value("[turns.length, $('empty') !== null]")

    assert before == "two"
    assert [message["content"] for message in edited["messages"]] == [
        *("one", "yes", "three\nfour"),
    ]
    assert again == edited
    assert left == [0, True]


@in_browser
def test_markdown_becomes_elements_and_markup_stays_text():
    """
    No element, script, image or link is made of what a model writes, and the browser lets no
    script of the page make any of a string.
    """
    with page_of(chatting(spelling(MARKDOWN))) as page:
        ask(page, "write")
        html = page.value("document.querySelector('.assistant .body').innerHTML")
        title = page.value("document.title")
        made = page.value("document.querySelectorAll('#log img, #log a').length")
        errors = [*page.errors]
        refused = page.value(
            "(() => { try { $('log').innerHTML = '<b>'; } catch (e) { return e.name; } })()"
        )

    assert (title, made) == ("pyllama_raw", 0)
    assert "<h3>One <em>title</em></h3>" in html
    assert "<p>Some <strong>bold</strong> and <code>code</code> and 2 * 3 * 4" in html
    nested = '<ol start="1"><li>deeper</li><li>still</li></ol>'
    assert f"<ul><li>a</li><li>b{nested}</li></ul>" in html
    assert "<blockquote>said</blockquote>" in html
    assert '<code>print("&lt;b&gt;")</code>' in html
    assert "&lt;img src=x onerror=document.title='hacked'&gt; [there](java" in html
    assert (errors, refused) == ([], "TypeError")


class Refusing:
    """Answers chats with a failure as long as there is one."""

    def __init__(self, app: Any) -> None:
        self.app, self.failure = app, None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app, failure = self.app, self.failure
        if failure is not None and scope.get("path") == "/v1/chat/completions":
            app = JSONResponse(failure.body(), failure.status, failure.headers)
        await app(scope, receive, send)


@in_browser
def test_a_key_is_asked_for_and_kept_for_the_tab(tmp_path):
    """
    Again if it is wrong, and if nobody gave one; a reload does not ask.
    """
    file = tmp_path / "keys"
    file.write_text(KEY)
    with page_of(chatting(spelling("yes")), api_keys_file=str(file)) as page:
        message = page.text("#key-message")
        page.press("Escape", 27)
        page.until("document.querySelector('.failure')")
        page.click(".failure button")
        for key in ("wrong", KEY):
            page.until("$('key').open")
            page.fill("#key input", key)
            page.enter()
            page.until("!$('key').open")
        page.until("$('model').value")
        first = ask(page, "hello")
        page.call("Page.reload")
        page.until("typeof turns === 'object' && !turns.length && $('model').value")
        second = ask(page, "hello")

    assert message.startswith("a key is needed")
    assert (first, second) == ("yes", "yes")


@in_browser
def test_errors_are_shown_as_the_api_tells_them():
    """
    The message and the field; after a 503, when to come again.
    """
    made: list[Refusing] = []

    def wrap(app: Any) -> Refusing:
        made.append(Refusing(app))
        return made[0]

    with page_of(chatting(spelling("yes")), wrap) as page:
        made[0].failure = Failure(400, "invalid", "top_p: too much", "top_p")
        ask(page, "hello")
        wrong = page.text(".failure")
        page.click("#new")
        headers = {"retry-after": "1"}
        made[0].failure = Failure(503, "full", "come later", headers=headers)
        ask(page, "hello")
        full = page.text(".failure")
        made[0].failure = None
        page.until("!document.querySelector('.failure button').disabled")
        page.click(".failure button")
        page.until("turns[1]?.text === 'yes'")

    assert [*filter(None, wrong.split("\n"))] == [
        *("400 · invalid · in top_p", "top_p: too much", "Try again"),
    ]
    assert [*filter(None, full.split("\n"))] == [
        *("503 · full", "come later", "Try again in 1 s"),
    ]


@in_browser
@pytest.mark.native
@pytest.mark.usefixtures("media_library")
def test_an_image_is_sent_where_the_model_takes_some():
    """
    As a data URL, before the text; the page offers it to no other model.
    """
    projector, model = tiny_projector("llava")
    config = EngineConfig(media=MediaConfig(mmproj=projector))
    image = base64.b64encode(image_file("png")).decode()
    with page_of(AsyncEngine.open(model, config)) as page:
        page.until("!$('attach').hidden")
        page.value(
            f"attach([new File([Uint8Array.from(atob('{image}'), "
            "(c) => c.charCodeAt(0))], 'a.png', {type: 'image/png'})])"
        )
        page.until("document.querySelector('#images img')")
        page.click("#open-options")
        page.fill("#options [name=max_tokens]", "2")
        page.click("#options .main")
        ask(page, "what is this?")
        [body] = page.posted("/v1/chat/completions")
        facts = page.text(".facts")
    with page_of(chatting(spelling("a"))) as page:
        is_hidden = page.value("$('attach').hidden")

    assert body["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "what is this?"},
    ]
    assert "2 tokens" in facts
    assert is_hidden


def test_slots_tell_what_they_have():
    """
    A running request by its tokens; others are free.
    """
    steps = Semaphore(3)
    executor = spelling("a" * 3000, on_step=waiting_for(steps))
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    with served(chatting(executor)) as url, ThreadPoolExecutor() as pool:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            asked = pool.submit(httpx.get, f"{url}/slots", timeout=LIMIT_S)
            while not wait([asked], 0.02).done:  # it is told between two steps
                steps.release()
            slots = asked.result().json()
        steps.release(10_000)  # for the rest, because no step begins without one
    known = slots[0]

    assert [slot["is_processing"] for slot in slots] == [True, False, False, False]
    assert (known["n_prompt"], known["n_cached"]) == (7, 0)
    assert known["n_computed"] == known["n_prompt"] + known["n_decoded"] - 1


@in_browser
def test_reasoning_and_calls_are_folded():
    """
    Each is under its title, around the text; none of them is text of the next request.
    """
    call = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    reply = f"<think>\nHm, <b>.\n</think>\n\nLet me see.{call}"
    with page_of(reply_engine(reply, "Dry.")) as page:
        text = ask(page, "Rain?")
        boxes = page.value(
            "[...document.querySelectorAll('.fold')].map((box) =>"
            " [box.open, ...[...box.children].map((node) => node.textContent)])"
        )
        order = page.value("[...turns[1].node.children].map((node) => node.className)")
        last = ask(page, "And now?")
        sent = page.posted("/v1/chat/completions")[1]["messages"]

    assert (text, last) == ("Let me see.", "Dry.")
    assert boxes == [
        [False, "Reasoning", "Hm, <b>."],
        [False, "Calls weather", '{"city": "Rome"}'],
    ]
    assert order == ["fold", "body", "fold", "facts", "actions"]
    assert [message["content"] for message in sent] == ["Rain?", text, "And now?"]
    assert page.errors == []
