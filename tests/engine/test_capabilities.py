"""What a file says a model is, and what it can be used for."""

import pytest

from pyllama_raw import EngineConfig
from pyllama_raw.engine.info import ModelClass, ModelInfo, capabilities_of, model_info
from pyllama_raw.errors import ModelLoadFailed, Unsupported
from pyllama_raw.native.gguf import Header, TensorInfo
from pyllama_raw.results import Operation, Pooling

GENERATE, EMBED, RANK = Operation

HEAD = TensorInfo("cls.output.weight", (64, 1), 0, 0)


def header(arch: str | None = None, tensors=(), **values) -> Header:
    own = {f"{arch}.{key.replace('__', '.')}": value for key, value in values.items()}
    if arch is not None:
        own["general.architecture"] = arch
    lengths = {"tokenizer.ggml.tokens": 320}
    return Header(own, lengths, tuple(tensors), n_left=0, alignment=32)


def info_of(arch: str | None = None, tensors=(), **values) -> ModelInfo:
    return model_info("x.gguf", header(arch, tensors, **values))


@pytest.mark.parametrize(
    ("kind", "architectures"),
    [
        (
            "encoder_only",
            "bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3 modern-bert "
            "neo-bert eurobert gemma-embedding t5encoder",
        ),
        ("encoder_decoder", "t5 bart"),
        ("diffusion", "dream llada llada-moe rnd1"),
        ("decoder_only", "qwen2 llama llama-embed unheard-of"),
    ],
)
def test_the_architecture_tells_the_class(kind, architectures):
    """
    Known encoders are encoders; what nobody has heard of is taken for a decoder.
    """
    found = {info_of(arch).model_class for arch in architectures.split()}

    assert found == {ModelClass(kind)}


def test_a_file_that_says_nothing_is_a_decoder():
    """
    Numbers that are not there are 0.
    """
    assert info_of() == ModelInfo(
        architecture="",
        model_class=ModelClass.DECODER_ONLY,
        pooling=None,
        is_causal=True,
        n_ctx_train=0,
        n_vocab=320,
        n_embd=0,
        embedding_dimensions=0,
        labels=(),
        n_layer=0,
        n_expert=0,
        n_files=1,
        has_rank_head=False,
        has_chat_template=False,
    )


@pytest.mark.parametrize(
    ("number", "pooling"),
    [
        (-1, None),
        (2**32 - 1, None),
        (0, Pooling.NONE),
        (1, Pooling.MEAN),
        (2, Pooling.CLS),
        (3, Pooling.LAST),
        (4, Pooling.RANK),
    ],
)
def test_poolings_have_the_numbers_of_libllama(number, pooling):
    """
    Each number of llama.h is its pooling.
    """
    assert info_of("bert", pooling_type=number).pooling is pooling


@pytest.mark.parametrize("number", [5, 99, -2])
def test_a_pooling_that_nobody_knows_is_refused(number):
    """
    libllama would end the process; the error names the key and the number.
    """
    with pytest.raises(ModelLoadFailed, match=rf"bert\.pooling_type={number} is not"):
        info_of("bert", pooling_type=number)


def test_values_of_another_kind_count_as_not_there():
    """
    libllama says what is wrong with them when it loads the model.
    """
    info = info_of("bert", pooling_type="mean", context_length=1.5, block_count="2")

    assert (info.pooling, info.n_ctx_train, info.n_layer) == (None, 0, 0)


def test_a_width_of_vectors_of_its_own_counts():
    """
    A model may project its vectors to another width.
    """
    info = info_of("qwen3", embedding_length=64, embedding_length_out=48)

    assert info.n_embd == 48


def test_what_begins_an_output_is_told_where_there_is_an_encoder():
    """
    Token 0 is one; a file may name none, and of a decoder alone nobody asks.
    """
    key = {"decoder_start_token_id": 0}
    found = [info_of("t5", **key), info_of("t5"), info_of("llama", **key)]

    assert [info.decoder_start_token_id for info in found] == [0, None, None]


@pytest.mark.parametrize(
    ("info", "operations"),
    [
        (info_of("llama"), (GENERATE, EMBED)),
        (info_of("qwen3", pooling_type=3), (GENERATE, EMBED)),
        (info_of("llama", attention__causal=False), (EMBED,)),
        (info_of("llama-embed", attention__causal=True), (EMBED,)),
        (info_of("bert", pooling_type=2), (EMBED,)),
        (info_of("bert", pooling_type=4), (EMBED,)),
        (info_of("bert", [HEAD], pooling_type=4), (EMBED, RANK)),
        (info_of("qwen3", [HEAD], pooling_type=4), (GENERATE, EMBED, RANK)),
        (info_of("t5"), (GENERATE,)),
        (info_of("t5", attention__causal=False), ()),
        (info_of("bart"), ()),
        (info_of("llada"), ()),
        (info_of("clef", pooling_type=0), ()),
    ],
)
def test_the_class_tells_what_a_model_can_do(info, operations):
    """
    What it cannot do is refused, with the operation and the reason.
    """
    capabilities = capabilities_of(info)

    assert capabilities.operations == operations
    for operation in Operation:
        if operation in operations:
            capabilities.check(operation)
        else:
            with pytest.raises(Unsupported) as caught:
                capabilities.check(operation)
            assert caught.value.operation == operation.value
            assert caught.value.reason == capabilities.refusals[operation]


def test_one_operation_of_several_is_enough():
    """
    The refusal of the first is told if there is none.
    """
    capabilities = capabilities_of(info_of("bert", pooling_type=2))

    capabilities.check(GENERATE, EMBED)

    with pytest.raises(Unsupported, match=r"^generate: 'bert' is an encoder"):
        capabilities.check(GENERATE, RANK)


@pytest.mark.native
@pytest.mark.parametrize("name", ["llada"])
def test_the_wrong_class_is_refused_before_weights_are_read(name, monkeypatch):
    """
    Opening an engine reads the header and nothing else.
    """
    from pyllama_raw.engine import opening
    from tests.support.tiny import tiny_model

    loads: list[object] = []
    monkeypatch.setattr(opening, "open_model", lambda *args: loads.append(args))

    with pytest.raises(Unsupported) as caught:
        opening.build(tiny_model(name), EngineConfig())

    assert (caught.value.operation, loads) == ("generate", [])


@pytest.mark.native
def test_an_override_counts_as_the_file():
    """
    kv_overrides change what a model is taken for.
    """
    from pyllama_raw.engine.info import probe
    from tests.support.tiny import tiny_model

    overrides = {"bert.pooling_type": 2}

    assert probe(tiny_model("bert")).model.pooling is Pooling.MEAN
    assert probe(tiny_model("bert"), overrides).model.pooling is Pooling.CLS


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "width", "labels"),
    [
        ("bert", 64, ()),
        ("bert-rank", 1, ()),
        ("bert-labels", 3, ("yes", "no", "maybe")),
    ],
)
def test_the_width_of_what_a_model_makes_of_a_text_is_in_its_header(
    name, width, labels
):
    """
    A vector has the width of the model, ranks have a score for each label, or one.
    """
    from pyllama_raw.engine.info import probe
    from tests.support.tiny import tiny_model

    model = probe(tiny_model(name)).model

    assert (model.embedding_dimensions, model.labels) == (width, labels)
