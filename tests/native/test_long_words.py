"""
Texts without a break, which std::regex of libllama recurses through, a frame a character.

Each name of a tokenizer has patterns of its own. They run in a process whose threads have stacks
of 1 MiB, because an overflow ends the process.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.model import Model
from pyllama_raw.native.vocab import MAX_WORD
from scripts.tiny_models.splitting import SPLITTING
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

LIMIT_S = 600
REFUSING = ["deepseek-llm", "jais-2", "superbpe", "whitespace"]
N_CHARACTERS = int(os.environ.get("PYLLAMA_RAW_TEST_CHARACTERS", "40000"))
PROGRAM = """
import sys, threading
from pyllama_raw.errors import InvalidRequest
from pyllama_raw.native.model import Model

path, n, *names = sys.argv[1:]
UNITS = ["A", "a", "7", " ", ".", "\\u6771", "\\n", "\\U0001f642", "a ", "\\u3000"]
refused = []

def run():
    for name in names:
        override = {"tokenizer.ggml.pre": name}
        with Model.load(path, vocab_only=True, kv_overrides=override) as model:
            for unit in UNITS:
                text = (unit * int(n))[: int(n)] + "1x"
                try:
                    tokens = model.vocab.tokenize(text, add_special=False, parse_special=True)
                except InvalidRequest:
                    refused.append((name, unit))
                else:
                    assert len(tokens) > 0, (name, unit)

threading.stack_size(2**20)
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(sorted({name for name, _ in refused}))
"""


@pytest.mark.parametrize(
    "names",
    [[*SPLITTING][::5], pytest.param([*SPLITTING], marks=pytest.mark.nightly)],
    ids=["some", "all"],
)
def test_no_long_word_ends_the_process(names):
    """
    All patterns take letters, digits, blanks, dots, wide characters and lines; or refuse them.
    """
    path = str(tiny_model("llama"))
    names = sorted({*names, *REFUSING})
    command = [sys.executable, "-c", PROGRAM, path, str(N_CHARACTERS), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(REFUSING)


def test_the_names_are_those_of_the_pinned_source():
    """
    A newer llama.cpp brings others, which are tried then, too.
    """
    import build_lib

    archive = build_lib.fetch.cache_dir() / "download" / Path(build_lib.SOURCE.url).name
    if not archive.is_file():
        pytest.skip("libllama was not built here")
    with tarfile.open(archive) as files:
        name = str(build_lib.SOURCE_FOLDER / "src" / "llama-vocab.cpp")
        file = files.extractfile(name)
        assert file is not None
        source = file.read().decode()

    names = re.findall(r'tokenizer_pre == "([^"]+)"', source)

    assert sorted(set(names)) == sorted(SPLITTING)


@pytest.mark.parametrize("splitting", ["gpt-4o", "qwen2"])
def test_a_long_word_has_the_tokens_of_its_text(splitting):
    """
    Wherever it is matched.
    """
    override = {"tokenizer.ggml.pre": splitting}
    text = "a" * 5000 + " " + "Ä" * 5000
    path = tiny_model("llama")
    with Model.load(path, vocab_only=True, kv_overrides=override) as model:
        vocab = model.vocab
        tokens = vocab.tokenize(text, add_special=False, parse_special=False)

        assert b"".join(vocab.pieces[token] for token in tokens).decode() == text


@pytest.mark.parametrize(
    ("splitting", "text", "words"),
    [
        ("gpt-4o", "a" * (MAX_WORD + 1), "262145 characters without a break"),
        ("deepseek-llm", " " * 600 + "1", "600 blanks in a row"),
        ("deepseek-llm", "\u3000" * 600 + "1", "600 blanks in a row"),
        ("superbpe", "7" * 600, "600 digits in a row"),
        ("whitespace", "a" + " " * 600 + "b", "600 blanks in a row"),
        ("whitespace", "a  b", "2 blanks in a row"),
    ],
)
def test_what_takes_too_much_is_refused(splitting, text, words):
    """
    The error names what there is too much of, and how much is allowed.
    """
    override = {"tokenizer.ggml.pre": splitting}
    with (
        Model.load(
            tiny_model("llama"), vocab_only=True, kv_overrides=override
        ) as model,
        pytest.raises(InvalidRequest, match=words),
    ):
        model.vocab.tokenize(text, add_special=False, parse_special=False)
