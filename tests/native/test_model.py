"""Loading a model file, and what is known of it."""

import gc
import struct
from pathlib import Path

import pytest

from pyllama_raw.errors import ClosedError, ConfigError, ModelLoadFailed
from pyllama_raw.native.model import LoadProgress, Model
from tests.native.support import make_context, make_prompt, prefill

pytestmark = pytest.mark.native


def test_a_model_describes_itself(model):
    """
    Numbers come from the file: positive, and consistent with one another.
    """
    assert model.n_vocab == model.vocab.n_tokens > 0
    assert 0 < model.n_head_kv <= model.n_head
    assert min(model.n_layer, model.n_embd, model.n_ctx_train) > 0
    assert model.size_bytes > model.n_vocab * model.n_embd // 8
    assert model.meta["general.architecture"]
    assert len(model.meta) > 10


def test_progress_ends_at_one(model_path):
    """
    Another thread can see how far a load has come; at the end that is all of it.
    """
    progress = LoadProgress()
    before = progress.fraction
    with Model.load(model_path, progress=progress):
        pass

    assert (before, progress.fraction) == (0.0, 1.0)


def test_a_load_can_be_cancelled(model_path):
    """
    A load that was cancelled, here before it begins, ends with an error that says so.
    """
    progress = LoadProgress()
    progress.cancel()
    with pytest.raises(ModelLoadFailed, match="cancelled") as caught:
        Model.load(model_path, progress=progress)

    assert caught.value.path == str(model_path)


def _header(version: int, n_tensors: int, n_pairs: int) -> bytes:
    return struct.pack("<4sIqq", b"GGUF", version, n_tensors, n_pairs)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"PK\3\4 not a model at all", "not a GGUF file"),
        (b"GGUF\3\0\0", "cut off after 7 bytes"),
        (_header(0, 1, 1), "version 0"),
        (_header(3, 1, -1), "damaged header"),
        (_header(3, 2**40, 3), "damaged header"),
        (_header(3, 0, 0), "llama"),
        (_header(3, 1, 1) + b"\xff" * 64, "llama"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    """
    A file that is no model is ModelLoadFailed, which names the path and the reason.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelLoadFailed, match=message) as caught:
        Model.load(path)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/file.gguf", "No such file"),
        ("/", "directory"),
        ("a\0b", "NUL"),
        ("", "directory|No such file"),
    ],
)
def test_paths_that_are_no_files_are_refused(path, message):
    """
    A path C would misread, or that is no file, never reaches C.
    """
    with pytest.raises(ModelLoadFailed, match=message):
        Model.load(path)


@pytest.mark.parametrize(
    ("fields", "knob"),
    [
        ({"devices": ("no such device",)}, "devices"),
        ({"n_gpu_layers": 2**31}, "n_gpu_layers"),
        ({"main_gpu": -1}, "main_gpu"),
        ({"split_mode": "diagonal"}, "split_mode"),
        ({"tensor_split": (1.0,) * 1000}, "tensor_split"),
        ({"kv_overrides": {"k" * 128: 1}}, "kv_overrides"),
        ({"kv_overrides": {"k": "v" * 128}}, "kv_overrides"),
        ({"kv_overrides": {"k": 2**63}}, "kv_overrides"),
        ({"n_layers": 3}, "n_layers"),
    ],
)
def test_fields_out_of_range_name_the_knob(model_path, fields, knob):
    """
    What C would cut off or misread is a ConfigError.
    """
    with pytest.raises(ConfigError, match=knob):
        Model.load(model_path, **fields)


def test_fields_reach_libllama(model_path):
    """
    An overridden metadata value is what the model then has.
    """
    overrides = {"llama.context_length": 4096, "tokenizer.ggml.add_bos_token": True}
    with Model.load(model_path, kv_overrides=overrides, load_mode="none") as model:
        assert model.n_ctx_train == 4096
        assert model.vocab.add_bos


def test_vocab_only_has_no_weights(model_path):
    """
    A model loaded for its vocabulary tokenizes; it says that it is nothing more.
    """
    with Model.load(model_path, vocab_only=True) as model:
        assert model.vocab_only
        assert model.vocab.tokenize("hi", add_special=False, parse_special=False)


def test_a_closed_model_is_refused_everywhere(model_path):
    """
    After close() every use is ClosedError, through the vocabulary too.
    """
    model = Model.load(model_path, vocab_only=True)
    vocab = model.vocab
    model.close()

    for use in (
        lambda: model.meta,
        model.chat_template,
        lambda: vocab.pieces[5],
        lambda: vocab.tokenize("a", add_special=False, parse_special=False),
        lambda: make_context(model),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_context_outlives_the_close_of_its_model(model_path: Path):
    """
    Closing the model first is safe: the open context goes on until it is closed.
    """
    model = Model.load(model_path)
    context = make_context(model)
    model.close()
    del model
    gc.collect()

    prefill(context, make_prompt(4))
    assert context.seq_pos_max(0) == 3
    context.close()
