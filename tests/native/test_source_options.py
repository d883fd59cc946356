"""Options and files of models whose encoder reads prompts: what is refused, and what is told."""

import pytest

from pyllama_raw import (
    CacheConfig,
    ConfigError,
    ContextConfig,
    Engine,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    estimate_memory,
    probe,
)
from pyllama_raw.engine import opening
from pyllama_raw.errors import ModelLoadFailed
from scripts.mutations.gguf_file import read
from tests.native.support import run_python
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

ONE = ContextConfig(n_threads=1, n_ctx=512)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(deterministic=True), "deterministic=True"),
        (EngineConfig(context=ContextConfig(kv_unified=False)), "kv_unified=False"),
        (EngineConfig(media=MediaConfig(mmproj="x.gguf")), "media.mmproj"),
    ],
)
def test_options_that_sources_do_not_bear_are_refused_before_weights_are_read(
    config, words, monkeypatch
):
    """
    The error names the option and what to give instead; estimates refuse it, too.
    """
    loads: list[object] = []
    monkeypatch.setattr(opening, "open_model", lambda *args: loads.append(args))

    with pytest.raises(ConfigError, match=words):
        opening.build(tiny_model("t5"), config)
    if not words.startswith("media"):
        with pytest.raises(ConfigError, match=words):
            estimate_memory(tiny_model("t5"), config)

    assert loads == []


def test_nothing_is_kept_of_what_was_read(tmp_path):
    """
    Snapshots, files and parked slots are not made, whatever the options say.
    """
    cache = CacheConfig(directory=tmp_path / "kept", parked_slots=4)
    config = EngineConfig(
        context=ONE, cache=cache, scheduler=SchedulerConfig(n_slots=2)
    )
    with Engine.open(tiny_model("t5"), config) as engine:
        first = engine.complete("a text to be read")
        second = engine.complete("a text to be read")
        stats = engine.stats()

    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 0)
    assert (stats.cache_bytes, stats.disk_bytes) == (0, 0)
    assert not (tmp_path / "kept").exists()


def test_probe_and_info_tell_what_begins_an_output():
    """
    The class, what it can do, and the token; its memory can be reckoned.
    """
    found = probe(tiny_model("t5"))
    model = found.capabilities.model
    estimate = estimate_memory(tiny_model("t5"), EngineConfig(context=ONE))
    with Engine.open(tiny_model("t5"), EngineConfig(context=ONE)) as engine:
        start = engine.info.vocab.decoder_start

    assert (model.model_class, model.decoder_start_token_id) == (
        "encoder_decoder",
        start.token_id,
    )
    assert found.capabilities.operations == ("generate",)
    assert (found.can_cut, found.can_shift) == (True, False)
    assert estimate.total_bytes > found.weights_bytes


def test_a_file_without_a_token_to_begin_with_takes_that_of_texts():
    """
    One that it names must be a token of the model.
    """
    none = ModelConfig(kv_overrides={"t5.decoder_start_token_id": -1})
    wrong = ModelConfig(kv_overrides={"t5.decoder_start_token_id": 10**6})
    with Engine.open(tiny_model("t5"), EngineConfig(model=none, context=ONE)) as engine:
        assert engine.complete("a").usage.completion_tokens > 0

    with pytest.raises(ModelLoadFailed, match="decoder_start_token_id=1000000"):
        Engine.open(tiny_model("t5"), EngineConfig(model=wrong, context=ONE))


@pytest.mark.parametrize("number", range(5))
def test_a_pooling_that_the_file_states_changes_nothing(number):
    """
    The decoder sees what the encoder made of each token.
    """
    model = ModelConfig(kv_overrides={"t5.pooling_type": number})
    outputs = []
    for config in (EngineConfig(context=ONE), EngineConfig(context=ONE, model=model)):
        with Engine.open(tiny_model("t5"), config) as engine:
            params = SamplingParams(temperature=0, max_tokens=12)
            outputs += [engine.complete(text, params).text for text in ("a", "bcd")]

    assert outputs[:2] == outputs[2:]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("part", [b"enc", b"dec"])
def test_a_file_without_a_tensor_that_graphs_take_for_granted_is_refused(
    part, tmp_path
):
    """
    libllama would read it all the same, and end the process.
    """
    file = read(tiny_model("t5"))
    name = part + b".blk.0.attn_rel_b.weight"
    file.tensors = [tensor for tensor in file.tensors if tensor.name != name]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(file.encode())

    with pytest.raises(ModelLoadFailed, match=f"{name.decode()}' is missing"):
        Engine.open(path, EngineConfig(context=ONE))


CODE = """
import sys
import anyio
from pyllama_raw import *

PROMPTS = "a", "b " * 400, [3], [3] * 64, [3] * 65, [319], "Z" * 10_000, "\\0", " "

async def main():
    for context in (
        {}, {"n_ubatch": 1, "n_batch": 8}, {"n_ubatch": 64}, {"flash_attn": "on"},
        {"flash_attn": "off"}, {"n_batch": 4096, "n_ubatch": 4096, "n_ctx": 4096},
        {"type_k": "q8_0", "type_v": "q8_0"}, {"fast_kernels": False},
    ):
        config = EngineConfig(
            context=ContextConfig(**{"n_ctx": 512, "n_threads": 2} | context),
            scheduler=SchedulerConfig(n_slots=3, context_full="shift"),
        )
        async with AsyncEngine.open(sys.argv[1], config) as engine:
            async def ask(prompt):
                params = SamplingParams(max_tokens=8, logprobs=1, seed=1)
                try:
                    await engine.complete(prompt, params)
                except RequestError:
                    pass
            async with anyio.create_task_group() as group:
                for prompt in PROMPTS * 2:
                    group.start_soon(ask, prompt)
            stats = engine.stats()
            print(stats.failed, stats.rebuilds, sum(stats.finished.values()) > 0)

anyio.run(main)
"""


def test_nothing_that_can_be_asked_ends_the_process():
    """
    Whatever prompts and context: what libllama would abort on is refused before.
    """
    done = run_python(CODE, tiny_model("t5"))

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["0 0 True"] * 8
