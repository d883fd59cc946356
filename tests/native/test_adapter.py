"""LoRAs and control vectors: what they change, and files that are refused."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from pyllama_raw.errors import AdapterLoadFailed
from pyllama_raw.native.model import ControlVector, Model, load_adapter
from scripts.mutations import gguf_file
from scripts.mutations.mutations import mutate
from tests.native.support import last_logits, make_context, make_prompt, run_python
from tests.support.tiny import tiny_adapter, tiny_model

pytestmark = pytest.mark.native

N_FILES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "100"))
PROMPT = make_prompt(12)
PROMPT[:] = type(PROMPT)("i", [token % 300 for token in PROMPT])


@pytest.fixture(scope="module")
def llama():
    with Model.load(tiny_model("llama")) as model:
        yield model


def logits_with(context, *adapters):
    context.set_adapters(adapters)
    context.clear()
    return last_logits(context, PROMPT)


def test_each_set_computes_something_else_and_none_what_the_model_does(llama):
    """
    Sets differ by what is in them and by scales; a scale of 0 is as if it was not there.
    """
    adapters = {n: load_adapter(llama, tiny_adapter(n)) for n in ("lora-a", "control")}
    lora, control = adapters.values()
    with make_context(llama) as context:
        base = last_logits(context, PROMPT)
        sets = [
            [(lora, 1.0)],
            [(lora, 0.5)],
            [(control, 1.0)],
            [(lora, 1.0), (control, 1.0)],
        ]
        found = [logits_with(context, *chosen) for chosen in sets]
        again = [logits_with(context, *chosen) for chosen in sets]
        off = [logits_with(context), logits_with(context, (lora, 0.0), (control, 0.0))]

    assert all(map(np.array_equal, found, again))
    assert all(np.array_equal(base, other) for other in off)
    different = [base, *found]
    assert len({one.tobytes() for one in different}) == len(different)
    assert min(np.abs(one - base).max() for one in found) > 0.01
    lora.close()


def test_an_adapter_for_experts_and_one_for_words_work():
    """
    Products of experts have matrices for each; a table of words is changed the other way.
    """
    for model_name, name in (("llama-moe", "lora-moe"), ("llama", "lora-words")):
        with (
            Model.load(tiny_model(model_name)) as model,
            make_context(model) as context,
        ):
            lora = load_adapter(model, tiny_adapter(name))
            with_it, without = logits_with(context, (lora, 1.0)), logits_with(context)
            lora.close()

        assert np.abs(with_it - without).max() > 0.01


def test_what_a_file_says_of_itself(llama):
    """
    Bytes of the tensors, and a digest that tells files apart.
    """
    names = ("lora-a", "lora-b", "control")
    found = {name: load_adapter(llama, tiny_adapter(name)) for name in names}

    n_bytes = 2 * (2 * 4 * (128 + 128) * 4 + 4 * (128 + 128) * 4)
    assert [found[name].n_bytes for name in ("lora-a", "control")] == [n_bytes, 512]
    assert len({each.digest for each in found.values()}) == 3
    assert isinstance(found["control"], ControlVector)


def test_adapters_come_and_go_while_another_thread_decodes(llama):
    """
    A context goes on meanwhile, with what it has, and gives the same.
    """
    code = """
import sys, threading
from tests.native.support import last_logits, make_context
from tests.native.test_adapter import PROMPT
from pyllama_raw.native.model import load_adapter
from pyllama_raw.native.model import Model
model = Model.load(sys.argv[1])
kept = load_adapter(model, sys.argv[2])
with make_context(model) as context:
    context.set_adapters([(kept, 1.0)])
    wanted = last_logits(context, PROMPT)
    ended = threading.Event()
    def come_and_go():
        for _ in range(200):
            load_adapter(model, sys.argv[3]).close()
        ended.set()
    thread = threading.Thread(target=come_and_go)
    thread.start()
    n = 0
    while not ended.is_set() or n < 20:
        n += 1
        context.set_adapters([])
        context.set_adapters([(kept, 1.0)])
        context.clear()
        assert (last_logits(context, PROMPT) == wanted).all()
    thread.join()
kept.close()
model.close()
print("alive")
"""
    done = run_python(
        code, tiny_model("llama"), tiny_adapter("lora-a"), tiny_adapter("lora-b")
    )

    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


def _hostile() -> dict[str, gguf_file.File]:
    """Files that libllama would end the process with, or read as something else."""
    found = {}

    def file(name: str, base: str = "lora-a") -> gguf_file.File:
        found[name] = gguf_file.read(tiny_adapter(base))
        return found[name]

    file("of another model", "lora-qwen2")
    file("no adapter").values[b"general.type"].data = b"model"
    file("no lora").values[b"adapter.type"].data = b"dora"
    file("no type").values.pop(b"general.type")
    file("alpha").values[b"adapter.lora.alpha"].data = float("nan")
    alpha = file("alpha as text").values[b"adapter.lora.alpha"]
    alpha.type, alpha.data = gguf_file.STRING, b"1"
    double = file("alpha of 64 bits").values[b"adapter.lora.alpha"]
    double.type = 12
    file("empty").tensors.clear()
    file("half a pair").tensors.pop()
    file("odd tensor").tensors[0].name = b"blk.0.attn_norm.weight"
    for part in file("unknown product").tensors[:2]:
        part.name = part.name.replace(b"blk.0", b"blk.7")
    experts = file("experts").tensors[0]
    experts.dims = [experts.dims[0], 2, 2]
    first = file("ranks differ").tensors[0]
    first.dims, first.data = [first.dims[0], 2], first.data[: len(first.data) // 2]
    for part in file("the other way").tensors[:2]:
        part.dims.reverse()
    file("integers").tensors[0].type = 26  # I32
    file("no such type").tensors[0].type = 4
    numbers = file("not finite").tensors[1]
    numbers.data = np.full(len(numbers.data) // 4, np.inf, np.float32).tobytes()
    file("cut off").tensors[-1].data = b""
    file("an aLoRA", "alora")
    vector = file("control of a layer that is not", "control").tensors[0]
    vector.name = b"direction.2"
    first_layer = file("control of the first layer", "control").tensors[0]
    first_layer.name = b"direction.0"
    wide = file("control of another width", "control").tensors[0]
    wide.dims, wide.data = [64], wide.data[:256]
    other = file("control for another model", "control").values
    other[b"controlvector.model_hint"].data = b"qwen2"
    file("control without", "control").tensors.clear()
    return found


REFUSED = """
import sys
from pathlib import Path
from pyllama_raw.errors import PyllamaError
from pyllama_raw.native.model import load_adapter
from pyllama_raw.native.model import Model
from tests.native.support import last_logits, make_context
from tests.native.test_adapter import PROMPT
model = Model.load(sys.argv[1])
with make_context(model) as context:
    for path in sorted(Path(sys.argv[2]).iterdir()):
        try:
            adapter = load_adapter(model, path)
            context.set_adapters([(adapter, 1.0)])
            context.clear()
            last_logits(context, PROMPT)
            context.set_adapters([])
            adapter.close()
            print(path.stem, "works", sep="|", flush=True)
        except PyllamaError as error:
            print(path.stem, type(error).__name__, error, sep="|", flush=True)
"""


def told_of(model_name: str, folder: Path) -> dict[str, str]:
    done = run_python(REFUSED, tiny_model(model_name), folder)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return {line.split("|")[0]: line.split("|")[1] for line in done.stdout.splitlines()}


def test_hostile_files_are_refused(tmp_path):
    """
    Each kind of misfit is an AdapterLoadFailed; none ends the process.
    """
    hostile = _hostile()
    for name, file in hostile.items():
        (tmp_path / f"{name}.gguf").write_bytes(file.encode())
    (tmp_path / "a folder.gguf").mkdir()
    (tmp_path / "no file.gguf").symlink_to(tmp_path / "nothing")
    names = [*hostile, "a folder", "no file"]

    assert told_of("llama", tmp_path) == dict.fromkeys(
        sorted(names), "AdapterLoadFailed"
    )


def test_words_that_are_the_output_too_are_refused(tmp_path):
    """
    libllama would multiply with the matrices that lie the other way, and end the process.
    """
    tied = gguf_file.read(tiny_model("llama"))
    tied.tensors = [
        tensor for tensor in tied.tensors if tensor.name != b"output.weight"
    ]
    path = tmp_path / "tied.gguf"
    path.write_bytes(tied.encode())
    words = gguf_file.read(tiny_adapter("lora-words"))
    words.tensors = [
        each for each in words.tensors if each.name.startswith(b"token_embd")
    ]
    adapter = tmp_path / "words.gguf"
    adapter.write_bytes(words.encode())

    with Model.load(path) as model, pytest.raises(AdapterLoadFailed, match="output"):
        load_adapter(model, adapter)


def test_no_mutated_file_ends_the_process(tmp_path):
    """
    A file with faults is refused by an error of this package, or works.
    """
    originals = [
        gguf_file.read(tiny_adapter(n)) for n in ("lora-a", "alora", "control")
    ]
    for index in range(N_FILES):
        rng = random.Random(index)  # noqa: S311 -- repeats
        raw = rng.choice(originals).encode()
        (tmp_path / "original").write_bytes(raw)
        content, _ = mutate(rng, gguf_file.read(tmp_path / "original"))
        (tmp_path / "original").unlink()
        (tmp_path / f"{index}.gguf").write_bytes(content)

    found = told_of("llama", tmp_path)

    assert len(found) == N_FILES
    assert set(found.values()) <= {"works", "AdapterLoadFailed", "DecodeFailed"}
