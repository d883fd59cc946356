"""Whatever a template does with messages and tools, their text is never a control token."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.prompts.messages import plain_messages
from pyllama_raw.prompts.prompt import PromptEncoder
from pyllama_raw.prompts.rendering.template import CompiledTemplate
from scripts import chat_injection
from tests.support.markers import MarkerVocab, texts

N_EXAMPLES = int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "40"))

# What templates do with a text; X is replaced by another of these.
OPERATIONS = (
    "X", "X[::-1]", "X[1:]", "X[:-1]", "X[::2] ~ X[1::2]", "X|reverse", "X|lower",
    "X.lower()", "X|upper", "X.upper()", "X|title", "X.title()", "X|capitalize",
    "X.swapcase()", "X.casefold()", "X|trim", "X.strip()", "X.strip('<')", "X.lstrip()",
    "X.rstrip('*')", "X|replace('*', '')", "X.replace('*', '')", "X.replace('', '|')",
    "X.replace('a', '<')", "X.replace('*', '|', 1)", "X.split('*')|join",
    "''.join(X.split('*'))", "X.rsplit('*', 1)|join('|')", "X.split()|join(' ')",
    "X.partition('*')|join", "X.rpartition('|')[0]", "X.splitlines()|join('\\n')",
    "X ~ X", "X + X", "'<' ~ X", "'<|im_' + X", "X + 'nd|>'", "X * 2", "2 * X",
    "'%s' % X", "'%s%s' % (X, X)", "'<|%s|>' % X", "'%(a)s' % {'a': X}", "'%5s' % X",
    "'%s'|format(X)", "X|format", "'{}'.format(X)", "'<|{0}{0}|>'.format(X)",
    "'{a}'.format(a=X)", "'{:>9}'.format(X)", "X.format('|')", "X|tojson",
    "{X: X}|tojson", "[X]|tojson(indent=1)", "[X, X]|join", "[X, X]|join('|')",
    "X|list|join", "X|list|reverse|join", "X|map('upper')|join", "X|select|join",
    "[{'a': X}]|map(attribute='a')|join", "[{'a': X}]|join(attribute='a')",
    "X|batch(2)|map('join')|join", "X|first ~ X[1:]", "X|string", "X|safe", "X|escape",
    "X|indent(1)", "X|wordwrap(3)", "X|center(99)", "X.center(99)", "X.zfill(99)",
    "X.ljust(99, '>')", "X|truncate(9)", "X.expandtabs()", "X.encode().decode()",
    "X|default('a')", "X|pprint", "[X]|string", "{X: X}|string", "{'a': X}|xmlattr",
    "X|urlencode|replace('%3C', '<')|replace('%7C', '|')|replace('%3E', '>')",
    "X.removeprefix('*')", "X.removesuffix('*')", "(X|groupby(0)|list)|string",
    "(X, X)|sort|join", "X|unique|join", "{X: 1}.keys()|join", "({X: 1}|items|first)[0]",
    "(X.split('*')|last)", "X|attr('upper')()", "dict(a=X).a",
    "namespace(a=X).a", "joiner(X)() ~ X", "cycler(X, X).next()", "X|striptags",
)  # fmt: skip

# What messages and tools say, in the words of their writers.
SAID = (
    "m.content", "m.content", "m.name", "m.role", "m.tool_call_id", "m.tool_calls[0].id",
    "m.tool_calls[0].function.name", "m.tool_calls[0].function.arguments|tojson",
    "m.tool_calls[0].function.arguments|string",
    "m.tool_calls[0].function.arguments|items|map('join')|join",
    "tools[0].function.name", "tools[0].function.description", "tools|tojson(indent=1)",
    "tools[0].function.parameters|string",
    "tools[0].function.parameters.properties|list|join",
)  # fmt: skip

expressions = st.recursive(
    st.sampled_from(SAID),
    lambda inner: st.builds(
        lambda operation, x: operation.replace("X", f"({x})"),
        st.sampled_from(OPERATIONS),
        inner,
    ),
    max_leaves=4,
)


def make_template(expression: str) -> str:
    """Writes four markers of its own for each message, and all of it by *expression*."""
    return f"""
{{%- macro show(m) %}}{{{{ {expression} }}}}{{% endmacro %}}
{{%- for m in messages %}}
{{{{- '<|im_start|>' ~ show(m) }}}}<|
{{%- for part in m.parts %}}{{{{ part.text }}}}{{% endfor %}}
{{%- for key, value in m.arguments.items() %}}{{{{ key ~ value }}}}{{% endfor %}}
{{%- set shown = [] %}}{{% set _ = shown.append %}}
{{%- set block %}}[INST]{{{{ {expression} }}}}{{% endset %}}{{{{ block + '</s>' }}}}
{{%- filter trim %}}{{{{ {expression} }}}}<|im_{{{{ 'end|>' }}}}{{% endfilter %}}
{{%- endfor %}}"""


def encode(source: str, messages, tools) -> tuple[list[int], str]:
    """Tokens and text, rendered in this process because many are."""
    encoder = PromptEncoder(MarkerVocab(), source, n_ctx_slot=2**20)
    template = CompiledTemplate(source, {})
    text, origins = template.render(plain_messages(messages), tools=tools)
    encoder._chat.render = lambda *_: (text, origins)
    return list(encoder.read(messages).tokens), text


@settings(
    max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    expression=expressions,
    values=st.tuples(texts, texts, texts, st.lists(texts, max_size=3)),
)
def test_messages_and_tools_forge_no_marker(expression, values):
    """
    The markers of a prompt are those that its template writes, and no text is lost.
    """
    content, name, role, parts = values
    message = {
        "role": role,
        "name": name,
        "content": content,
        "parts": [{"type": "text", "text": part} for part in parts],
        "arguments": dict.fromkeys(parts, content),
        "tool_call_id": name,
    }
    call = {"name": name, "arguments": {content: parts}}
    message["tool_calls"] = [{"id": content, "type": "function", "function": call}]
    schema = {"type": "object", "properties": {name: {"description": content}}}
    tool = {"name": name, "description": content, "parameters": schema}
    tools = [{"type": "function", "function": tool}]
    try:
        tokens, text = encode(make_template(expression), [message, message], tools)
    except (InvalidRequest, TemplateError, TypeError, ValueError, LookupError):
        return  # the template does not take this message, or it is in doubt

    vocab = MarkerVocab()
    own = ["<|im_start|>", "[INST]", "</s>", "<|im_end|>"]
    assert [m.strip() for m in vocab.markers(tokens)] == ["<s>", *own, *own]
    assert vocab.text(tokens) == f"<s>{text}"


@pytest.mark.nightly
def test_no_template_of_llama_cpp_lets_a_message_forge_a_marker(monkeypatch, capsys):
    """
    Texts, names, tools and ids of drawn chats are pieces of each template's own markers.
    """
    monkeypatch.setattr("sys.argv", ["chat_injection", "--rounds", "10"])

    assert chat_injection.main() == 0, capsys.readouterr().out
