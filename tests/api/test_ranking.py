"""Documents are ranked by tiny models with heads."""

import json
from array import array
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from pyllama_raw import AsyncEngine, ContextConfig, EmbeddingConfig, EngineConfig
from pyllama_raw.api.embedding import pair_tokens
from pyllama_raw.errors import EmbeddingFailed, InvalidRequest, TextTooLong, Unsupported
from tests.api.bert_reference import BertReference
from tests.api.embedding_support import with_nan
from tests.support.last_digits import assert_near
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.anyio
native = pytest.mark.native

QUERY = "what is a panda"
DOCUMENTS = [
    "hello",
    "the panda is a bear",
    "to be or not to be",
    "a",
    "pandas eat bamboo",
]


def open_engine(model: str | Path, **fields: Any):
    path = tiny_model(model) if isinstance(model, str) else model
    config = EngineConfig(context=ContextConfig(n_threads=1), **fields)
    return AsyncEngine.open(path, config)


class PairVocab:
    """A token a letter; specials are 1000 and more."""

    def __init__(self, **facts: Any) -> None:
        self.bos, self.eos, self.sep = 1000, 1001, 1002
        self.add_bos = self.add_eos = self.add_sep = False
        self.special_texts = {"<s>": True, "<user>": False}
        vars(self).update(facts)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> array:
        assert not add_special
        begins, *others = text.split("<s>") if parse_special else [text]
        tokens = array("i", list(begins.encode()))
        for other in others:
            tokens.append(1000)
            tokens.extend(other.encode())
        return tokens


Q, D = [*b"q"], [*b"d"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, [*Q, *D]),
        ({"add_bos": True}, [1000, *Q, *D]),
        ({"add_eos": True}, [*Q, 1001, *D, 1001]),
        ({"add_sep": True}, [*Q, 1002, *D]),
        (
            {"add_bos": True, "add_eos": True, "add_sep": True},
            [1000, *Q, 1001, 1002, *D, 1001],
        ),
        ({"add_eos": True, "eos": None}, [*Q, 1002, *D, 1002]),
        ({"add_eos": True, "eos": None, "sep": None}, [*Q, *D]),
    ],
)
def test_a_pair_has_the_separators_of_the_vocabulary(facts, expected):
    """
    As llama-server puts them, with the separator where there is no end.
    """
    vocab: Any = PairVocab(**facts)

    assert list(pair_tokens(vocab, None, "q", "d")) == expected


def test_a_template_of_the_file_makes_the_pair():
    """
    Its control tokens are understood, those in a text of the caller are not.
    """
    vocab: Any = PairVocab()
    template = "<s>{query}|{document}"

    plain = pair_tokens(vocab, template, "q", "d")
    hostile = pair_tokens(vocab, template, "q", "<s>")

    assert list(plain) == [1000, *b"q|d"]
    assert list(hostile) == [1000, *b"q|<s>"]


@native
@pytest.mark.parametrize("name", ["bert-rank", "bert-labels", "qwen3-rank"])
async def test_documents_are_ranked(name):
    """
    The best is first, and a document has the scores that it has alone.
    """
    async with open_engine(name) as engine:
        ranked = await engine.rank(QUERY, DOCUMENTS)
        alone = [(await engine.rank(QUERY, [text]))[0] for text in DOCUMENTS]

    scores = [one.score for one in ranked]
    assert [one.n_tokens for one in ranked] == [
        alone[one.index].n_tokens for one in ranked
    ]
    assert all(one.n_tokens > len(QUERY.split()) for one in ranked)
    assert sorted(one.index for one in ranked) == list(range(len(DOCUMENTS)))
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(DOCUMENTS)
    for one in ranked:
        assert one.scores.keys() == alone[one.index].scores.keys()
        found, expected = list(one.scores.values()), alone[one.index].scores.values()
        assert_near(found, list(expected), 1e-6)


@native
async def test_a_causal_reranker_reads_a_pair_in_parts():
    """
    Its last token sees all before it: a pair that no step holds has the scores of a whole one.
    """
    documents = [*DOCUMENTS, "pandas eat bamboo, and so on, " * 20]
    async with open_engine("qwen3-rank") as engine:
        whole = await engine.rank(QUERY, documents)
    small = EmbeddingConfig(max_step_tokens=64)
    async with open_engine("qwen3-rank", embedding=small) as engine:
        parts = await engine.rank(QUERY, documents)

    assert [one.index for one in parts] == [one.index for one in whole]
    for one, other in zip(parts, whole, strict=True):
        found, expected = list(one.scores.values()), list(other.scores.values())
        assert_near(found, expected, 1e-5)


@native
async def test_scores_have_the_labels_of_the_file():
    """
    A head without labels has one score; a causal one makes probabilities of its scores.
    """
    names = {}
    for name in ("bert-rank", "bert-labels", "qwen3-rank"):
        async with open_engine(name) as engine:
            (ranked,) = await engine.rank(QUERY, ["a"])
            names[name] = (tuple(ranked.scores), sum(ranked.scores.values()))

    assert names["bert-rank"][0] == ("0",)
    assert names["bert-labels"][0] == ("yes", "no", "maybe")
    assert names["qwen3-rank"] == (("yes", "no", "maybe"), pytest.approx(1))


@native
async def test_wrong_pairs_are_refused():
    """
    The error names the document; the engine goes on.
    """
    async with open_engine("bert-rank") as engine:
        with pytest.raises(InvalidRequest, match=r"documents\[1\]=''"):
            await engine.rank(QUERY, ["a", ""])
        with pytest.raises(InvalidRequest, match="query='' is not"):
            await engine.rank("", ["a"])
        with pytest.raises(InvalidRequest, match=r"documents=.* at least 1 item"):
            await engine.rank(QUERY, [])
        with pytest.raises(TextTooLong, match=r"documents\[0\] has \d+ tokens"):
            await engine.rank(QUERY, ["Z" * 2100])
        with pytest.raises(TextTooLong, match=r"query has \d+ tokens or more"):
            await engine.rank("Z" * 100_000, ["a"])
        assert len(await engine.rank(QUERY, ["a"])) == 1


@native
@pytest.mark.parametrize("name", ["bert-rank", "qwen3-rank"])
async def test_a_document_of_what_is_no_number_fails_its_own_call(name, tmp_path: Path):
    """
    The call is told which document it is; a call beside it has its scores.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(with_nan(tiny_model(name), token=ord("Z")))
    found: list[Any] = []
    async with open_engine(path) as engine:

        async def rank() -> None:
            found.extend(await engine.rank(QUERY, DOCUMENTS * 10))

        async with anyio.create_task_group() as group:
            group.start_soon(rank)
            with pytest.raises(EmbeddingFailed) as caught:
                await engine.rank(QUERY, ["a", "b", "Zed", "c"])

    assert caught.value.index == 2
    assert len(found) == 10 * len(DOCUMENTS)
    assert np.isfinite([one.score for one in found]).all()


@native
@pytest.mark.parametrize("name", ["bert", "llama"])
async def test_a_model_without_head_ranks_nothing(name):
    """
    The refusal comes before anything is computed.
    """
    async with open_engine(name) as engine:
        with pytest.raises(Unsupported, match="the model is no reranker") as caught:
            await engine.rank(QUERY, DOCUMENTS)

    assert caught.value.operation == "rank"


SCORES = (
    Path(__file__).parents[1] / "snapshots" / "rerank.json"
)  # by benchmarks/rerank.py


@native
@pytest.mark.parametrize("name", ["bert-rank", "bert-labels"])
async def test_scores_are_near_those_of_64_bits(name):
    """
    Within 0.0025, because keys and values are rounded to 16 bits. libllama's flash attention,
    which also rounds queries and sums, is up to 0.005 away.
    """
    kept = json.loads(SCORES.read_text())
    reference = BertReference(tiny_model(name))
    async with open_engine(name) as engine:
        vocab = engine._parts.vocab
        for query, documents in kept["pairs"].items():
            ranked = await engine.rank(query, documents)
            scores = [one.score for one in sorted(ranked, key=lambda r: r.index)]
            pairs = [pair_tokens(vocab, None, query, text) for text in documents]
            expected = [reference.scores(pair)[0] for pair in pairs]

            assert_near(scores, expected, 2.5e-3)


@native
@pytest.mark.parametrize("name", ["bert-rank", "bert-labels", "qwen3-rank"])
async def test_scores_are_near_those_of_llama_server(name):
    """
    Within 0.0035 of what llama-server has said once of these documents, in the same order.
    """
    kept = json.loads(SCORES.read_text())
    found: list[list[float]] = []
    async with open_engine(name) as engine:
        for query, documents in kept["pairs"].items():
            ranked = await engine.rank(query, documents)
            found.append([one.score for one in sorted(ranked, key=lambda r: r.index)])

    for scores, expected in zip(found, kept["scores"][name], strict=True):
        np.testing.assert_allclose(scores, expected, rtol=0, atol=3.5e-3)
        assert list(np.argsort(scores)) == list(np.argsort(expected))
