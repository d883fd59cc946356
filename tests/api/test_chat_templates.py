"""Chat templates by text, name and file, and models that have none."""

import pytest

from pyllama_raw import ConfigError, Engine, EngineConfig, ModelConfig
from pyllama_raw.api.model import _check_template
from pyllama_raw.cli.inputs import Outcome, parse_line
from pyllama_raw.errors import InvalidRequest, Unsupported
from pyllama_raw.options.chat_templates import (
    MAX_BYTES,
    TEMPLATES,
    given_template,
    model_template,
)
from pyllama_raw.prompts.chat import check_reads
from pyllama_raw.prompts.rendering.template import CompiledTemplate
from pyllama_raw.testing import fake_engine
from scripts.mutations import gguf_file
from tests.support.tiny import tiny_model

CHAT = [{"role": "user", "content": "Name a colour."}]
MINE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SILENT = {
    "nothing of it": "{{ bos_token }}",
    "how many": "{% if messages %}{{ messages | length }}{% endif %}",
    "their roles": "{% for m in messages %}<{{ m.role }}>{% endfor %}",
    "a field that is not there": "{% for m in messages %}{{ m.text }}{% endfor %}",
    "the system's": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_named_template_prints_a_whole_chat(name):
    """
    With a system message in front and another one later on.
    """
    template = CompiledTemplate(TEMPLATES[name], {"bos_token": "", "eos_token": ""})
    roles = ("system", "user", "assistant", "system", "user")
    chat = [{"role": role, "content": f"text{i}"} for i, role in enumerate(roles)]

    text, _ = template.render(chat)

    places = [text.find(message["content"]) for message in chat]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("chatml", "chatml"),
        ("ChatML-tools", "hermes"),
        ("qwen2.5", "hermes"),
        ("llama-3.1", "llama3"),
        ("gemma-3", "gemma"),
        ("phi", "phi3"),
        ("mistral-instruct", "mistral"),
    ],
)
def test_names_are_found_as_people_write_them(word, name):
    """
    With versions, capitals and signs between.
    """
    assert given_template(word).source == name


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.jinja").write_text(MINE)
    (tmp_path / "plain.txt").write_text("You are kind.")
    (tmp_path / "bytes").write_bytes(b"\xff{{")
    (tmp_path / "large").write_bytes(b"{{" + b" " * MAX_BYTES)
    return tmp_path


@pytest.mark.parametrize(
    "value", ["plain.txt", "bytes", "large", ".", "none", "a\nb", ""]
)
def test_what_is_no_template_is_refused(value, folder):
    """
    In options of engines by the option, and never with what a file says.
    """
    path = str(folder / value) if value and "\n" not in value else value

    with pytest.raises(ConfigError, match=r"ModelConfig\.chat_template=") as caught:
        ModelConfig(chat_template=path)

    assert "kind" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["no-such", "/some/where.jinja", "{{ bos_token }}", "x"]
)
@pytest.mark.anyio
async def test_a_request_whose_template_reads_no_messages_is_refused(value):
    """
    Also in a line of JSON, where it is the error of that line.
    """
    async with fake_engine(chat_template=MINE) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.render(CHAT, chat_template=value)
    named = {"messages": CHAT, "chat_template": value}
    line = parse_line(0, str(named).replace("'", '"').encode(), defaults={})

    assert caught.value.name == "chat_template"
    if "{{" not in value:
        assert isinstance(line, Outcome)
        assert line.error.name == "chat_template"


@pytest.mark.anyio
async def test_a_template_of_a_model_that_reads_no_messages_is_refused():
    """
    As one of a request is.
    """
    async with fake_engine(chat_template="{{ bos_token }}Hello") as engine:
        with pytest.raises(Unsupported, match="messages"):
            await engine.render(CHAT)


@pytest.mark.parametrize("source", SILENT.values(), ids=SILENT)
@pytest.mark.anyio
async def test_a_template_that_prints_nothing_of_what_a_user_says_is_refused(source):
    """
    That of a request, of the options and of the model: each error says what to do about it.
    """
    async with fake_engine(chat_template=source) as engine:
        with pytest.raises(Unsupported, match="same prompt") as own:
            await engine.render(CHAT)
    async with fake_engine(chat_template=MINE) as engine:
        with pytest.raises(InvalidRequest, match="same prompt") as of_request:
            await engine.render(CHAT, chat_template=source)
    with pytest.raises(ConfigError, match="same prompt") as of_options:
        _check_template(ModelConfig(chat_template=source))

    assert of_request.value.name == "chat_template"
    assert str(of_options.value).startswith("chat_template=")
    for error in (own, of_request, of_options):
        assert "`content`" in str(error.value)
        assert "'chatml', by chat_template=" in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages }}",
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content[0].text }}",
        "{{ messages[1].content }}",
        "{% if tools %}{{ messages[-1].content }}{% endif %}",
        "{% for m in messages %}{% if m.role == 'human' %}{{ m.content }}{% endif %}{% endfor %}",
        "{{ raise_exception('not such a chat') }}{{ messages }}",
    ],
)
def test_a_template_that_may_print_what_a_user_says_is_taken(source):
    """
    In one form, in one place, only beside tools, for a role of its own; one that refuses what is
    tried is given the benefit of the doubt.
    """
    check_reads(source)


@pytest.mark.anyio
async def test_a_request_may_name_a_template_or_a_file(folder):
    """
    For itself only.
    """
    async with fake_engine() as engine:
        named = await engine.render(CHAT, chat_template="llama3")
        read = await engine.render(CHAT, chat_template=str(folder / "mine.jinja"))
        with pytest.raises(Unsupported, match=r"ModelConfig\.chat_template") as caught:
            await engine.render(CHAT)

    assert (
        "<|start_header_id|>user<|end_header_id|>\n\nName a colour.<|eot_id|>" in named
    )
    assert read == "<user>Name a colour."
    assert "chat_template=" in caught.value.reason


def test_whose_template_it_is():
    """
    The one that is given, else the model's own, else the fallback if that is asked for; a path
    in a model file is no path.
    """
    sources = [
        model_template(given, own) and model_template(given, own).source
        for given, own in (
            (None, None),
            ("auto", None),
            ("auto", MINE),
            (None, MINE),
            ("llama3", MINE),
        )
    ]

    assert sources == [None, "chatml (fallback)", "model", "model", "llama3"]
    assert model_template(None, "chatml").text == TEMPLATES["chatml"]
    assert model_template(None, __file__).text == __file__


@pytest.mark.native
def test_an_engine_has_the_template_of_its_options(caplog, folder):
    """
    By name or file; without one it refuses chats, or has the fallback, which it logs.
    """
    file = gguf_file.read(tiny_model("llama"))
    del file.values[b"tokenizer.chat_template"]
    model, texts, sources = folder / "bare.gguf", {}, {}
    model.write_bytes(file.encode())
    for given in ("auto", "hermes", str(folder / "mine.jinja")):
        config = EngineConfig(model=ModelConfig(chat_template=given))
        with Engine.open(model, config) as engine:
            texts[given] = engine.render(CHAT)
            sources[given] = engine.info.chat_template
            if given == "hermes":
                assert '"name": "f"' in engine.render(CHAT, tools=[TOOL])
    with (
        Engine.open(model) as engine,
        pytest.raises(Unsupported, match="no chat template"),
    ):
        engine.render(CHAT)

    assert texts["auto"].startswith("<|im_start|>user\nName a colour.")
    assert texts[str(folder / "mine.jinja")] == "<user>Name a colour."
    assert [*sources.values()] == [
        "chatml (fallback)",
        "hermes",
        str(folder / "mine.jinja"),
    ]
    logged = [r.message for r in caplog.records if "no chat template" in r.message]
    assert len(logged) == 1


@pytest.mark.native
def test_a_template_that_cannot_be_used_opens_no_engine():
    """
    The error names the option before the model is loaded.
    """
    for given in ("{{ bos_token }}", "{% if %}{{ messages }}"):
        config = EngineConfig(model=ModelConfig(chat_template=given))
        with pytest.raises(ConfigError, match="chat_template"):
            Engine.open("no-such.gguf", config).__enter__()


@pytest.mark.native
def test_a_trusted_template_runs_in_this_process(monkeypatch):
    """
    Within a time of its own; what it prints is the same.
    """
    from pyllama_raw.prompts.rendering import processes

    def refuse():
        raise AssertionError("a process was started")

    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
    monkeypatch.setattr(processes, "interpreter", refuse)
    config = ModelConfig(chat_template="hermes", template_process=False)
    with Engine.open(tiny_model("llama"), EngineConfig(model=config)) as engine:
        text = engine.render(CHAT, tools=[TOOL])
        with pytest.raises(InvalidRequest, match="within 4 s of CPU time"):
            engine.render(CHAT, chat_template=endless)
        again = engine.render(CHAT)

    assert '"name": "f"' in text
    assert again.startswith("<|im_start|>user\nName a colour.")
