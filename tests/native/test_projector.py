"""A projector makes rows of images and sounds; a cut says what they will be."""

from array import array
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path

import numpy as np
import pytest

from pyllama_raw.errors import (
    BadMedia,
    EncodeFailed,
    ModelLoadFailed,
    ProjectorLoadFailed,
    Unsupported,
)
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import (
    Bitmap,
    EncodeCall,
    Projector,
    RowRun,
    check_projector,
)
from pyllama_raw.native.sampler import RowSampler
from scripts.mutations.gguf_file import Tensor, Value, read
from scripts.tiny_models.projectors import F16
from tests.api.media_engines import deep_projector
from tests.native.media_support import N_SAMPLES, loaded, rows_of, sample
from tests.native.support import EXACT, generate, make_context
from tests.support.limits import LIMIT_S
from tests.support.tiny import PROJECTORS, tiny_model, tiny_projector

pytestmark = pytest.mark.native

# n_cells, n_pos and is_causal of each run of rows of the sample.
ROWS = {
    "llava": [(4, 4, True)],
    "idefics3": [(1, 1, True)] * 5,
    "gemma3": [(4, 4, False)],
    "qwen2vl": [(8, 4, True)],
    "ultravox": [(375, 375, True)],
    "qwen2a": [(750, 750, True)],
}


@pytest.mark.parametrize("name", PROJECTORS)
def test_a_cut_tells_what_an_encode_makes(name):
    """
    Rows, positions and causality are known before the encode, also of a placeholder.
    """
    with loaded(name) as projector, sample(projector) as bitmap:
        empty = Bitmap.image(100, 60) if projector.sees else Bitmap.sound(N_SAMPLES)
        with empty, projector.cut(empty) as planned, projector.cut(bitmap) as cut:
            rows = rows_of(projector, cut)

            runs = [run for run in cut.runs if isinstance(run, RowRun)]
            assert planned.runs == cut.runs
            assert [(r.n_cells, r.n_pos, r.is_causal) for r in runs] == ROWS[name]
            widths = [len(found) for found in rows.values()]
            assert widths == [run.n_cells * projector.n_embd for run in runs]
            assert len({found.tobytes() for found in rows.values()}) == len(runs)


@pytest.mark.parametrize("name", PROJECTORS)
def test_facts_of_a_projector(name):
    """
    A projector says what it takes, at which rate, and how much memory it needs.
    """
    is_sound = PROJECTORS[name].size == 0

    with loaded(name) as projector:
        facts = projector.sees, projector.hears, projector.sample_rate
        size = projector.n_bytes

    assert facts == (not is_sound, is_sound, 16000 if is_sound else None)
    assert size > tiny_projector(name)[0].stat().st_size / 2


def test_positions_of_an_image_have_a_place_in_it():
    """
    With M-RoPE a row has a time, a row and a column; text goes on behind the longer side.
    """
    with loaded("qwen2vl") as projector, sample(projector) as bitmap:
        with projector.cut(bitmap) as cut:
            run = next(run for run in cut.runs if isinstance(run, RowRun))

    assert run.positions_at(10) == array(
        "i",
        [
            *[10] * 8,
            *[10, 10, 10, 10, 11, 11, 11, 11],
            *[10, 11, 12, 13, 10, 11, 12, 13],
            *[0] * 8,
        ],
    )


def test_equal_images_have_equal_rows_and_others_others():
    """
    Rows depend on the image alone, also after other encodes and from several threads.
    """
    with loaded("idefics3") as projector:
        bitmaps = [sample(projector, seed) for seed in (0, 1)]
        cuts = [projector.cut(bitmap) for bitmap in bitmaps]
        alone = [rows_of(projector, cut) for cut in cuts]

        with ThreadPoolExecutor(4) as pool:
            together = list(
                pool.map(lambda i: rows_of(projector, cuts[i % 2]), range(8))
            )

        assert together == alone * 4
        assert alone[0] != alone[1]


@pytest.mark.parametrize("name", PROJECTORS)
def test_a_cancelled_encode_gives_nothing_and_harms_nobody(name):
    """
    An encode that was cancelled gives None, and the next one is right.
    """
    with loaded(name) as projector, sample(projector) as bitmap:
        with projector.cut(bitmap) as cut:
            index = next(i for i, r in enumerate(cut.runs) if isinstance(r, RowRun))
            before = projector.encode(cut, index)
            control = EncodeCall()
            control.cancel()

            cancelled = projector.encode(cut, index, control)

            assert cancelled is None
            assert projector.encode(cut, index) == before


@pytest.mark.parametrize("name", PROJECTORS)
def test_an_encode_has_a_border_behind_each_layer(name):
    """
    It can be cancelled there, and steps are computed.
    """
    with loaded(name) as projector, sample(projector) as bitmap:
        with projector.cut(bitmap) as cut:
            index = next(i for i, r in enumerate(cut.runs) if isinstance(r, RowRun))
            control = EncodeCall()
            projector.encode(cut, index, control)

            assert control.n_borders == 2 + 1  # the beginning, a layer, the end


def test_steps_are_computed_in_the_midst_of_an_encode(tmp_path):
    """
    An encode keeps no stream waiting until its end, and neither changes the other.
    """
    path, prompt = deep_projector(tmp_path / "deep.gguf"), array("i", range(40, 50))
    with (
        Model.load(tiny_projector("llava")[1]) as model,
        Projector.load(path, model) as projector,
        make_context(model, **EXACT) as context,
        sample(projector) as bitmap,
        projector.cut(bitmap) as cut,
        ThreadPoolExecutor(1) as pool,
    ):
        alone = projector.encode(cut, 0), generate(context, prompt, 8, RowSampler())
        was_over = True
        for _ in range(100):  # an encode may end before the first step
            context.seq_rm(0)
            control = EncodeCall()
            running = pool.submit(projector.encode, cut, 0, control)
            while not control.n_borders:
                pass  # bounded by the limit of pytest
            tokens = generate(context, prompt, 8, RowSampler())
            was_over = running.done()
            assert (running.result(LIMIT_S), tokens) == alone
            if not was_over:
                break

        assert not was_over


def test_a_projector_of_another_model_is_refused(tmp_path):
    """
    A row is as wide as an embedding of the model; a text model is no projector.
    """
    llava, _ = tiny_projector("llava")
    with Model.load(tiny_model("gemma3")) as model:
        for path, kind in (
            (llava, ProjectorLoadFailed),
            (tiny_model("llama"), ProjectorLoadFailed),
            (tmp_path / "missing.gguf", ModelLoadFailed),
        ):
            with pytest.raises(kind):
                Projector.load(path, model)


def test_a_projector_that_needs_more_memory_than_there_is_is_refused(monkeypatch):
    """
    Linux would end the process in the first encode.
    """
    with loaded("llava") as projector:
        needed = projector.n_bytes

    monkeypatch.setattr("pyllama_raw.native.projector.available_bytes", lambda: needed)
    with loaded("llava"):
        pass
    monkeypatch.setattr(
        "pyllama_raw.native.projector.available_bytes", lambda: needed - 1
    )
    with pytest.raises(ProjectorLoadFailed, match=f"needs {needed} bytes"):
        with loaded("llava"):
            pass


def test_a_model_without_the_words_of_the_projector_is_refused():
    """
    SmolVLM writes special words around slices; a model without them cannot read the prompt.
    """
    path, _ = tiny_projector("idefics3")
    with Model.load(tiny_model("llama")) as model:
        with pytest.raises(ProjectorLoadFailed, match="no tokens for words"):
            Projector.load(path, model)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        (b"clip.vision.patch_size", 0, ProjectorLoadFailed),
        (b"clip.vision.image_size", 0, ProjectorLoadFailed),
        (b"clip.vision.attention.head_count", 0, ProjectorLoadFailed),
        (b"clip.vision.embedding_length", 0, ProjectorLoadFailed),
        (b"clip.vision.patch_size", 2**32 - 1, ProjectorLoadFailed),
        (b"clip.vision.image_size", 2**15, ProjectorLoadFailed),
        (b"clip.vision.attention.layer_norm_epsilon", -1.0, ProjectorLoadFailed),
        (b"clip.vision.attention.layer_norm_epsilon", nan, ProjectorLoadFailed),
        (b"clip.projector_type", b"hunyuanvl", Unsupported),
        (b"clip.projector_type", b"nonsense", ProjectorLoadFailed),
    ],
)
def test_damaged_projectors_are_refused(tmp_path, key, value, kind):
    """
    What clip.cpp would divide by, or aborts on, is found out before it opens the file.
    """
    source, model_path = tiny_projector("llava")
    file = read(source)
    file.values[key] = Value(file.values[key].type, value)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(file.encode())

    with Model.load(model_path) as model, pytest.raises(kind):
        Projector.load(path, model)


@pytest.mark.parametrize("kind", ["gemma3nv", "gemma4uv", "yasa2"])
def test_a_kind_without_heads_may_state_none(tmp_path, kind):
    """
    Its graph divides by no number of heads, so the file is mtmd's to judge.
    """
    source, _ = tiny_projector("llava")
    file = read(source)
    file.values[b"clip.projector_type"].data = kind.encode()
    file.values[b"clip.vision.attention.head_count"].data = 0
    path = tmp_path / "headless.gguf"
    path.write_bytes(file.encode())

    check_projector(str(path), on_host=True)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        *(
            (name, "v.patch_embd.weight")
            for name in PROJECTORS
            if PROJECTORS[name].size
        ),
        *((name, "blk.0.attn_k.weight") for name in PROJECTORS),
        ("llava", "v.position_embd.weight"),
        ("llava", "mm.0.bias"),
        ("llava", "mm.2.bias"),
        ("qwen2vl", "v.blk.0.attn_q.bias"),
        ("ultravox", "a.position_embd.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(tmp_path, name, tensor):
    """
    mtmd does not ask for some, and its graphs read them nevertheless.
    """
    source, model_path = tiny_projector(name)
    file = read(source)
    file.tensors = [t for t in file.tensors if not t.name.endswith(tensor.encode())]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(file.encode())

    with Model.load(model_path) as model:
        with pytest.raises(ProjectorLoadFailed, match=f"{tensor}' is missing"):
            Projector.load(path, model)


def test_what_fails_in_the_threads_of_ggml_is_an_error_before(tmp_path):
    """
    A weight of a type that no kernel takes, and a table with too few rows: encodes fail, and
    the process goes on.
    """
    source, model_path = tiny_projector("llava")
    with Model.load(model_path) as model:
        for change in (halve_a_bias, cut_the_table):
            file = read(source)
            change({tensor.name: tensor for tensor in file.tensors})
            path = tmp_path / f"{change.__name__}.gguf"
            path.write_bytes(file.encode())
            with (
                Projector.load(path, model, n_threads=2) as projector,
                sample(projector) as bitmap,
                projector.cut(bitmap) as cut,
                pytest.raises(EncodeFailed, match=r"is not as (ADD|GET_ROWS) needs it"),
            ):
                projector.encode(cut, 0)


def halve_a_bias(tensors: dict[bytes, Tensor]) -> None:
    bias = tensors[b"v.blk.0.ln2.bias"]
    numbers = np.frombuffer(bias.data, np.float32)[: bias.dims[0]]
    bias.type, bias.data = F16, numbers.astype(np.float16).tobytes()


def cut_the_table(tensors: dict[bytes, Tensor]) -> None:
    table = tensors[b"v.position_embd.weight"]
    table.dims[1], table.data = 3, table.data[: 3 * 4 * table.dims[0]]


def ultravox_of(stack: int, path: Path) -> Path:
    """A projector that joins *stack* rows in one, with weights for these."""
    file = read(tiny_projector("ultravox")[0])
    key = b"clip.audio.projector.stack_factor"
    file.values[key] = Value(file.values[key].type, stack)
    for tensor in file.tensors:
        if tensor.name in (b"mm.a.norm_pre.weight", b"mm.a.mlp.1.weight"):
            tensor.dims[0] = tensor.dims[0] * stack // 4
            tensor.data = (tensor.data * stack)[: len(tensor.data) * stack // 4]
    path.write_bytes(file.encode())
    return path


def test_a_projector_whose_sizes_do_not_agree_fails_its_encodes_only(tmp_path):
    """
    clip.cpp aborts if a projector gives another number of rows: it is an error instead.
    """
    path = ultravox_of(8, tmp_path / "eight.gguf")  # 1500 rows are no multiple of it
    with Model.load(tiny_model("llama")) as model, Projector.load(path, model) as other:
        with sample(other) as bitmap, other.cut(bitmap) as cut:
            for _ in range(2):
                with pytest.raises(EncodeFailed, match="Invalid number of output"):
                    other.encode(cut, 0)


def test_rows_that_are_no_numbers_are_refused(tmp_path):
    """
    A projector that gives NaN fails its encode: such rows would spread in a context.
    """
    source, model_path = tiny_projector("llava")
    file = read(source)
    bias = next(t for t in file.tensors if t.name == b"mm.2.bias")
    bias.data = np.full(len(bias.data) // 4, np.nan, np.float32).tobytes()
    path = tmp_path / "nan.gguf"
    path.write_bytes(file.encode())

    with Model.load(model_path) as model, Projector.load(path, model) as projector:
        with sample(projector) as bitmap, projector.cut(bitmap) as cut:
            with pytest.raises(EncodeFailed, match="not a number"):
                projector.encode(cut, 0)


def test_sounds_and_images_for_projectors_without_support():
    """
    A projector that does not hear refuses sounds, and one that does not see images.
    """
    with loaded("llava") as eyes, loaded("qwen2a") as ears:
        with pytest.raises(Unsupported, match="does not hear"):
            eyes.cut(Bitmap.sound(16000))
        with pytest.raises(Unsupported, match="does not see"):
            ears.cut(Bitmap.image(10, 10))


@pytest.mark.parametrize("name", [n for n, p in PROJECTORS.items() if p.size])
@pytest.mark.parametrize("size", [(1, 1), (1, 16384), (16384, 1), (4000, 3000)])
def test_sizes_at_the_limits_work_or_are_refused(name, size):
    """
    No size within the limits ends the process: it has rows, or is an error.
    """
    with loaded(name) as projector, Bitmap.image(*size) as bitmap:
        try:
            with projector.cut(bitmap) as cut:
                n_cells = sum(run.n_cells for run in cut.runs)
        except BadMedia:
            n_cells = None

    assert n_cells is None or n_cells > 0


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (100_000, 1), (16384, 16384)])
def test_sizes_beyond_the_limits_are_refused(size):
    """
    mtmd computes sizes in 32 bits, so larger images are refused before.
    """
    with pytest.raises(BadMedia):
        Bitmap.image(*size)
    with pytest.raises(BadMedia):
        Bitmap.image(2, 2, bytes(11))
    for n_samples in (0, 1, 2**30):
        with pytest.raises(BadMedia):
            Bitmap.sound(n_samples)
