"""`embed` and `rank` at the command line, on tiny models."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_native import run
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native


def test_texts_become_json_lines():
    """
    A line for each text, in their order, with a vector of length 1.
    """
    done = run(
        *("embed", "--model", str(tiny_model("bert")), "--input", "-"),
        stdin='"hello"\n\n{"text": "the panda"}\n',
    )

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["index"] for line in lines] == [0, 1]
    lengths = [np.linalg.norm(line["embedding"]) for line in lines]
    np.testing.assert_allclose(lengths, 1, atol=1e-6)


def test_vectors_become_an_array_in_a_file(tmp_path: Path):
    """
    A row for each text, cut to the dimensions that were asked for.
    """
    path = tmp_path / "vectors.npy"

    done = run(
        *("embed", "--model", str(tiny_model("bert")), "a", "b", "c"),
        *("--npy", str(path), "--dimensions", "8", "--raw", "--pooling", "cls"),
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert np.load(path).shape == (3, 8)


def test_tokens_have_vectors_of_their_own():
    """
    With --tokens a line has a vector for each token.
    """
    done = run("embed", "--model", str(tiny_model("bert")), "--tokens", "ab")

    (line,) = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, len(line["embedding"][0])) == (0, 64)
    assert len(line["embedding"]) > 1


@pytest.mark.parametrize("command", [("embed",), ("rank", "q")], ids=["embed", "rank"])
def test_the_limit_of_a_text_can_be_moved(command):
    """
    The flag reaches the engine, whose advice for a text that is too long names it.
    """
    name = "bert" if command == ("embed",) else "bert-rank"
    line = *command, "a" * 100, "--max-step-tokens", "64"

    refused = run(*line, "--model", str(tiny_model(name)))
    done = run(*line[:-1], "2048", "--model", str(tiny_model(name)))

    assert (refused.returncode, done.returncode) == (1, 0)
    assert "at most 64 are allowed: shorten it, or raise max_step_tokens" in (
        refused.stderr
    )


def test_documents_are_ranked_as_json_lines():
    """
    The best comes first, with its score, its place and its text.
    """
    done = run("rank", "--model", str(tiny_model("bert-rank")), "panda", "a", "b", "cd")

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted((line["index"], line["document"]) for line in lines) == [
        (0, "a"), (1, "b"), (2, "cd"),
    ]  # fmt: skip
    scores = [line["score"] for line in lines]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("embed", "--model", "bert"), 2, "give texts or --input FILE"),
        (
            ("embed", "--model", "bert", "--tokens", "--npy", "x", "a"),
            2,
            "--tokens is not allowed with",
        ),
        (("embed", "--model", "t5", "a"), 1, "embed: 't5' has an encoder beside"),
        (("embed", "--model", "llama", "a"), 1, "the model states no pooling"),
        (("rank", "--model", "bert", "q", "a"), 1, "rank: the model is no reranker"),
        (("generate", "--model", "bert", "a"), 1, "generate: 'bert' is an encoder"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, status, words):
    """
    A mistake in the flags is 2, a model that cannot do it 1.
    """
    command, flag, name, *others = arguments

    done = run(command, flag, str(tiny_model(name)), *others)

    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_line_that_is_no_text_is_named():
    """
    Nothing is computed for the others.
    """
    done = run(
        *("embed", "--model", str(tiny_model("bert")), "--input", "-"),
        stdin='"a"\n\n{"texts": []}\n',
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert "line 3='{\"texts\": []}' is not allowed" in done.stderr


def test_info_shows_an_encoder():
    """
    What the header says comes before what takes the weights.
    """
    done = run("info", str(tiny_model("bert")), "--json")

    facts = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert facts["file"]["model_class"] == "encoder_only"
    assert facts["file"]["pooling"] == "mean"
    assert facts["file"]["operations"] == "embed"
    assert facts["file"]["no_generate"].startswith("'bert' is an encoder")
    assert facts["limits"]["n_ubatch"] == 2048


def test_info_shows_what_reads_prompts():
    """
    The token that begins an output, how much is read at once, and the kernels.
    """
    done = run("info", str(tiny_model("t5")), "--json")

    facts = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert facts["file"]["model_class"] == "encoder_decoder"
    assert facts["file"]["decoder_start_token_id"] == 316
    assert facts["file"]["operations"] == "generate"
    assert (facts["limits"]["n_source"], facts["limits"]["cache"]) == (512, "off")
    assert facts["limits"]["kernels"].startswith("attention")
