"""Weights that libllama keeps in an order of its own: for AMX, or repacked."""

import re
from pathlib import Path

import numpy as np
import pytest

from pyllama_raw import ContextConfig, EngineConfig, ModelConfig, SchedulerConfig
from pyllama_raw.engine.estimate import kernels_used
from pyllama_raw.native.kernels import Watch
from pyllama_raw.native.libllama import system_info
from pyllama_raw.native.model import Model, quantize
from tests.native.support import last_logits, make_context, make_prompt
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

# Of logits: sums of other lengths, and other roundings of the scales of columns.
TOLERANCE = 0.05
DEFAULT, TINY = "default", "tiny"


@pytest.fixture(scope="module")
def quantised(model_path, tmp_path_factory):
    """The file of a model in a type, made once."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(name: str, kind: str) -> Path:
        path = folder / f"{name}-{kind}.gguf"
        if not path.exists():
            quantize(model_path if name == DEFAULT else tiny_model("llama"), path, kind)
        return path

    return make


def _logits(path: Path, *, use_extra_bufts: bool) -> tuple[list[np.ndarray], set[str]]:
    """Of a prompt and four tokens after it; whose kernels computed products."""
    watch = Watch()
    with (
        Model.load(path, use_extra_bufts=use_extra_bufts) as model,
        make_context(model, watch=watch, flash_attn="off") as context,
    ):
        prompt = make_prompt(40)
        for index, token in enumerate(prompt):
            prompt[index] = token % model.n_vocab
        rows = [last_logits(context, prompt)]
        rows += [
            last_logits(context, prompt[i : i + 1], pos=len(prompt) + i)
            for i in range(4)
        ]
        whose = {name for counts in watch.products.values() for name in counts}
    return rows, whose


def _assert_close(packed: list[np.ndarray], plain: list[np.ndarray]) -> None:
    for a, b in zip(packed, plain, strict=True):
        # The largest of 49,152 errors would be a matter of luck: columns are rounded to 8 bits.
        size = np.abs(b).max()
        assert np.sqrt(np.square(a - b).mean()) <= TOLERANCE * size
        assert b[a.argmax()] >= b.max() - TOLERANCE * size


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_products_have_the_digits_of_plain_ones(quantised, kind):
    """
    Prompts and single tokens, in whatever order libllama keeps the weights here.
    """
    path = quantised(TINY, kind)

    packed, _ = _logits(path, use_extra_bufts=True)
    plain, by_plain = _logits(path, use_extra_bufts=False)

    _assert_close(packed, plain)
    assert by_plain <= {"ours", "libllama's"}


@pytest.mark.parametrize(
    ("kind", "types"), [("q4_1", {"q4_1", "q8_0"}), ("q4_k_m", {"q4_K", "q6_K"})]
)
def test_amx_computes_the_types_it_has(quantised, kind, types):
    """
    Where the CPU has AMX: from the first decode on, with the digits of other kernels.
    """
    if "AMX_INT8 = 1" not in system_info():
        pytest.skip("this CPU has no AMX, or libllama was built without it")
    path = quantised(DEFAULT, kind)

    packed, _ = _logits(path, use_extra_bufts=True)
    plain, _ = _logits(path, use_extra_bufts=False)

    _assert_close(packed, plain)
    with (
        Model.load(path, use_extra_bufts=True) as model,
        make_context(model, watch=(watch := Watch())) as context,
    ):
        last_logits(context, make_prompt(64))
        used = watch.products
    assert {tuple(used[name]) for name in types} == {("AMX",)}


def test_the_line_for_people_names_whose_kernels_compute(quantised):
    """
    Attention, and each type of weights with its share of multiply-adds. libllama has an order
    of its own for Q4_0 wherever there is AVX2, on lesser CPUs none.
    """
    config = EngineConfig(
        model=ModelConfig(use_extra_bufts=False),
        context=ContextConfig(fast_kernels=False, n_ctx=64),
    )
    path = quantised(TINY, "q4_0")
    with Model.load(path, **config.model.loading) as model:
        plain = kernels_used(model, config)
    with Model.load(path, use_extra_bufts=True) as model:
        packed = kernels_used(model, config)

    share = r"(\d+\.\d)%"
    line = f"attention libllama's; q4_0 libllama's {share}; q8_0 libllama's {share}"
    shares = re.fullmatch(line, plain)
    assert shares is not None
    assert sum(map(float, shares.groups())) == pytest.approx(100, abs=0.11)
    in_order = re.match(
        r"attention libllama's; q4_0 (AMX|libllama's, repacked) ", packed
    )
    assert in_order or ("AVX2 = 1" not in system_info() and packed == plain)


@pytest.mark.parametrize("fields", [{"n_batch": 1, "n_ubatch": 1}, {"n_ctx": 1}])
def test_the_line_needs_no_room(fields):
    """
    The smallest contexts are asked with a single token.
    """
    with Model.load(tiny_model("llama")) as model:
        one = SchedulerConfig(n_slots=1)
        config = EngineConfig(context=ContextConfig(**fields), scheduler=one)
        line = kernels_used(model, config)

    assert line.startswith("attention ")
