"""
Model files that would end the process, or never end, are refused before they can.

Each file is a tiny model with one thing changed. Files are opened in this process: what is
refused never reaches a decode.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native.gguf import is_weight_type
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from scripts.mutations.gguf_file import ARRAY, STRING, U32, File, Value, read
from scripts.tiny_models import gguf
from scripts.tiny_models.recipe import Recipe, experts, sizes
from tests.native.support import unlike_before
from tests.support.tiny import RECIPES, tiny_model

pytestmark = pytest.mark.native

NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")


def changed(folder: Path, name: str, change: Callable[[File], object]) -> Path:
    """The tiny model *name* with something changed."""
    file = read(tiny_model(name))
    change(file)
    path = folder / "model.gguf"
    path.write_bytes(file.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        Model.load(path)
    assert caught.value.path == str(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *sorted(RECIPES.keys() - {"llada"}),
        pytest.param("llada", marks=unlike_before("has no llada with biases")),
    ],
)
def test_files_in_order_are_loaded(name):
    """
    No tiny model is refused, whatever its architecture.
    """
    with Model.load(tiny_model(name)) as model:
        assert model.n_ctx_train == 2048


@pytest.mark.parametrize("name", ["llama", "mamba", "mamba2", "rwkv7", "jamba"])
@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1])
def test_a_context_length_that_cannot_be_used_is_named(tmp_path, name, value):
    """
    Less than a prompt and one token, or more than 31 bits: key, value and limits are told.
    """
    key = f"{name}.context_length"
    path = changed(
        tmp_path, name, lambda f: f.values.update({key.encode(): Value(U32, value)})
    )

    said = refusal(path)

    assert f"{key}={value} is not allowed" in said
    assert f"2 to {2**31 - 1}" in said


@pytest.mark.parametrize("value", [2, 3, 2**31 - 1])
def test_the_shortest_and_the_longest_context_are_loaded(tmp_path, value):
    """
    What is at the limits is no fault.
    """
    key = b"mamba.context_length"
    path = changed(
        tmp_path, "mamba", lambda f: f.values.update({key: Value(U32, value)})
    )

    with Model.load(path) as model:
        assert model.n_ctx_train == value


def test_an_override_is_checked_like_the_file(tmp_path):
    """
    kv_overrides cannot give what the file must not say.
    """
    with pytest.raises(ModelLoadFailed, match=r"mamba\.context_length=2147483648"):
        Model.load(tiny_model("mamba"), kv_overrides={"mamba.context_length": 2**31})


def test_a_window_of_more_than_31_bits_is_refused(tmp_path):
    """
    Every number of 32 bits that libllama reports with a sign is compared with its limits.
    """
    key = b"gemma3.attention.sliding_window"
    path = changed(
        tmp_path, "gemma3", lambda f: f.values.update({key: Value(U32, 2**31)})
    )

    assert "gemma3.attention.sliding_window=2147483648 is not allowed" in refusal(path)


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_a_matrix_that_nothing_multiplies_is_refused(tmp_path, kind):
    """
    Four bytes of the table make a matrix one of integers: libllama would call no function.
    """
    tensors = read(tiny_model("llama")).tensors
    matrices = [t.name for t in tensors if len(t.dims) > 1]
    said = []
    for name in matrices:

        def change(file: File, name: bytes = name) -> None:
            found = next(t for t in file.tensors if t.name == name)
            found.type = getattr(lib, f"GGML_TYPE_{kind}")

        said.append(refusal(changed(tmp_path, "llama", change)))

    assert len(matrices) > 10
    for name, text in zip(matrices, said, strict=True):
        assert f"tensor {name.decode()!r} has the type {kind}, which nothing" in text


def test_every_type_is_a_weight_or_is_refused():
    """
    A type that llama.cpp adds, and that is no quantised weight, is found here.
    """
    kinds = {
        name.removeprefix("GGML_TYPE_"): getattr(lib, name)
        for name in dir(lib)
        if name.startswith("GGML_TYPE_") and name != "GGML_TYPE_COUNT"
    }

    assert {name for name, kind in kinds.items() if not is_weight_type(kind)} == set(
        NO_WEIGHTS
    )


def set_dims(dims: list[int]) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.tensors[0].dims = dims

    return change


def set_offset(file: File) -> None:
    file.tensors[1].offset = 2**40


def set_name(name: bytes) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.tensors[1].name = name

    return change


def same_name(file: File) -> None:
    file.tensors[1].name = file.tensors[0].name


def set_type(kind: int) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.tensors[0].type = kind

    return change


def set_value(key: bytes, value: Value) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.values[key] = value

    return change


def set_counts(n_tensors: int | None, n_values: int | None) -> Callable[[File], None]:
    def change(file: File) -> None:
        file.n_tensors, file.n_values = n_tensors, n_values

    return change


HUGE = (2**62).to_bytes(8, "little")


FAULTS: dict[str, tuple[Callable[[File], None], str]] = {
    "no value": (set_dims([0, 2]), "each must be 1 or more"),
    "negative": (set_dims([-1, 2]), "each must be 1 or more"),
    "beyond 64 bits": (set_dims([2**40, 2**40]), "has the dimensions"),
    "beyond the file": (set_dims([2**20, 2**20]), "the file is cut off"),
    "no dimension": (set_dims([]), "has 0 dimensions, 1 to 4 are allowed"),
    "five dimensions": (set_dims([1] * 5), "has 5 dimensions, 1 to 4 are allowed"),
    "a type to come": (set_type(1000), "which there is not"),
    "a negative type": (set_type(-1), "which there is not"),
    "a removed type": (set_type(4), "which there is not"),  # Q4_2
    "elsewhere": (set_offset, r"is at 1099511627776, not at \d+"),
    "no name": (set_name(b""), "is named ''"),
    "a long name": (set_name(b"x" * 64), "1 to 63 bytes"),
    "one name twice": (same_name, "each once"),
    "value type": (set_value(b"x", Value(99, 0)), "x has the type 99"),
    "array type": (set_value(b"x", Value(ARRAY, [], 9)), "x has the type 9"),
    "string": (
        set_value(b"x", Value(STRING, b"", raw=HUGE)),
        "x is cut off or damaged",
    ),
    "strings": (
        set_value(b"x", Value(ARRAY, [], raw=b"\x08\0\0\0" + HUGE)),
        "x is cut",
    ),
    "numbers": (
        set_value(b"x", Value(ARRAY, [], raw=b"\x0a\0\0\0" + HUGE)),
        "x is cut",
    ),
    "no key": (set_value(b"", Value(U32, 1)), "has the key ''"),
    "alignment 0": (set_value(b"general.alignment", Value(U32, 0)), "a power of 2"),
    "alignment 48": (set_value(b"general.alignment", Value(U32, 48)), "a power of 2"),
    "tensors": (set_counts(2**21, None), "do not fit|at most"),
    "values": (set_counts(None, 2**17), "do not fit|at most"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_header_is_described(tmp_path, fault):
    """
    The refusal names the entry that is wrong, before libllama reads it.
    """
    change, message = FAULTS[fault]

    said = refusal(changed(tmp_path, "llama", change))

    assert re.search(message, said)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    """
    No length is trusted: any beginning of a file is ModelLoadFailed.
    """
    whole = tiny_model("qwen2").read_bytes()
    path = tmp_path / "model.gguf"
    for n_bytes in range(0, len(whole), len(whole) // 150):
        path.write_bytes(whole[:n_bytes])
        refusal(path)


def test_a_pipe_is_refused_without_waiting(tmp_path):
    """
    Nobody writes into it: to open it would never end.
    """
    path = tmp_path / "model.gguf"
    os.mkfifo(path)

    assert "not a regular file" in refusal(path)


def test_every_part_of_a_divided_model_is_checked(tmp_path):
    """
    What is wrong in a later file is told with its name.
    """

    def divide(file: File) -> None:
        file.values[b"split.count"] = Value(2, 2)
        file.values[b"split.no"] = Value(2, 0)

    first = tmp_path / "model-00001-of-00002.gguf"
    second = tmp_path / "model-00002-of-00002.gguf"
    first.write_bytes(changed(tmp_path, "llama", divide).read_bytes())
    with pytest.raises(ModelLoadFailed) as missing:
        Model.load(first)
    second.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadFailed) as damaged:
        Model.load(first)

    assert (missing.value.path, damaged.value.path) == (str(second), str(second))
    assert "are missing: model-00002-of-00002.gguf" in str(missing.value)
    assert "cut off after 4 bytes" in str(damaged.value)


def test_a_layer_may_lie_in_two_files(tmp_path):
    """
    What a tensor of the first file needs may stand in a later one.
    """
    whole = read(tiny_model("falcon-h1"))
    later = [t for t in whole.tensors if t.name.endswith(b"ssm_conv1d.bias")]
    first = [t for t in whole.tensors if t not in later]
    for number, tensors in enumerate((first, later)):
        counts = {
            b"split.no": Value(2, number),
            b"split.count": Value(2, 2),
            b"split.tensors.count": Value(5, len(whole.tensors)),
        }
        path = tmp_path / f"model-{number + 1:05}-of-00002.gguf"
        path.write_bytes(File(whole.values | counts, tensors).encode())

    with Model.load(tmp_path / "model-00001-of-00002.gguf") as model:
        assert len(model.header.tensors) == len(whole.tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("nemotron_h", "blk.0.ssm_conv1d.bias"),
        ("falcon-h1", "blk.1.ssm_conv1d.bias"),
        ("granitehybrid", "blk.0.ssm_conv1d.bias"),
        ("qwen35", "blk.0.attn_gate.weight"),
        ("qwen35", "blk.0.attn_qkv.weight"),
        ("qwen3next", "blk.0.attn_gate.weight"),
        ("qwen3next", "blk.0.attn_qkv.weight"),
    ],
)
def test_a_tensor_that_libllama_takes_for_granted_must_be_there(tmp_path, name, tensor):
    """
    It is optional for the loader, and read without a look by the graph.
    """

    def drop(file: File) -> None:
        n_before = len(file.tensors)
        file.tensors = [t for t in file.tensors if t.name != tensor.encode()]
        assert len(file.tensors) == n_before - 1

    assert f"tensor {tensor!r} is missing" in refusal(changed(tmp_path, name, drop))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen35", "full_attention_interval"),
        ("qwen3next", "full_attention_interval"),
        ("qwen3next", "ssm.group_count"),
        ("qwen3next", "ssm.time_step_rank"),
        ("mamba2", "ssm.group_count"),
        ("mamba2", "ssm.time_step_rank"),
        ("rwkv7", "wkv.head_size"),
    ],
)
def test_nothing_is_divided_by_zero(tmp_path, name, key):
    """
    What libllama divides by is 1 or more, in the file and as an override.
    """
    said = f"{name}.{key}=0 is not allowed"
    whole = f"{name}.{key}"
    path = changed(tmp_path, name, set_value(whole.encode(), Value(U32, 0)))

    assert said in refusal(path)
    with pytest.raises(ModelLoadFailed, match=said):
        Model.load(tiny_model(name), kv_overrides={whole: 0})


def test_a_window_that_a_graph_takes_for_granted_has_to_be_stated(tmp_path):
    """
    libllama would make memory without windows, and end the process with the first graph.
    """
    recipe = Recipe(
        "afmoe", "afmoe", sizes(2, 1, n_layer=4, expert_shared_count=1) | experts()
    )
    path = tmp_path / "model.gguf"
    gguf.write(recipe, path)
    said = "afmoe.attention.sliding_window is not stated"

    assert said in refusal(path)
    with Model.load(path, kv_overrides={"afmoe.attention.sliding_window": 32}) as model:
        assert model.n_swa == 32
