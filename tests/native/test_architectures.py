"""Files of all architectures; what became of each one is told by scripts/try_architectures.py."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native.gguf import INDEXED, NEEDS, NOT_ZERO, check_gguf
from scripts.mutations.gguf_file import File, Tensor
from scripts.tiny_models.architectures import IMPOSSIBLE, NAMES
from scripts.tiny_models.gguf_values import encode
from scripts.try_architectures import unread_keys

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
N_RULED = sum(len(rule.architectures) for rule in NOT_ZERO)


def counts_of(text: str) -> dict[str, int]:
    lines = (line.strip().partition(" ") for line in text.splitlines())
    return {what: int(count) for count, _, what in lines if count.isdecimal()}


def tried(*names: str) -> dict[str, int]:
    """What became of files of *names*, or of all architectures."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.try_architectures", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-4000:]
    return counts_of(done.stdout)


def test_some_architectures_are_refused_for_no_key_that_they_do_not_read():
    """
    A tiny file of each comes to the same with zeros where other architectures divide.
    """
    counts = tried("llama", "llama4", "mamba2", "jamba", "qwen3next", "bert", "rwkv7")

    assert counts["made: works"] == 7
    assert counts["unread keys 0: works"] == counts["as made: works"] == 7


@pytest.mark.nightly
def test_no_architecture_is_refused_for_keys_that_it_does_not_read():
    """
    The same of all. What breaks a rule of its own is refused, and libllama itself does not
    run it.
    """
    counts = tried()

    n_made = len(NAMES) - len(IMPOSSIBLE)
    assert counts["made: works"] == n_made
    assert counts["as made: works"] >= 0.9 * n_made
    assert counts["unread keys 0: works"] == counts["as made: works"]
    assert counts["read keys 0: refused"] == N_RULED
    assert counts["without a tensor: refused"] >= len(NEEDS)


def header(folder: Path, arch: str, values: Mapping[str, object]) -> str:
    """A file of *arch* that has nothing but a header and two numbers."""
    names = ("blk.0.attn_k_b.weight", "blk.0.indexer.proj.weight")
    file = File(tensors=[Tensor(name.encode(), [1], 0, bytes(4)) for name in names])
    file.values[b"general.architecture"] = encode(arch)
    for key, value in values.items():
        file.values[f"{arch}.{key}".encode()] = encode(value)
    path = folder / "model.gguf"
    path.write_bytes(file.encode())
    return str(path)


@pytest.mark.parametrize("arch", NAMES)
def test_a_header_with_zeros_for_other_architectures_is_in_order(tmp_path, arch):
    """
    Nothing is refused for a key that only others read.
    """
    keys = (*unread_keys(arch), "ssm.conv_kernel", "ssm.state_size")
    values = {"attention.sliding_window": 1} | dict.fromkeys(keys, 0)

    found = check_gguf(header(tmp_path, arch, values))

    assert found.values["general.architecture"] == arch


@pytest.mark.parametrize("rule", NOT_ZERO, ids=lambda rule: rule.key)
def test_a_rule_names_architectures_and_its_reason(tmp_path, rule):
    """
    Each refusal tells the key and why; all architectures are ones that libllama has.
    """
    for arch in rule.architectures:
        path = header(tmp_path, arch, {rule.key: 0})
        with pytest.raises(ModelLoadFailed) as caught:
            check_gguf(path)
        assert f"{arch}.{rule.key}=0 is not allowed, because {rule.because}" in str(
            caught.value
        )

    assert set(rule.architectures) <= set(NAMES)


def test_a_key_that_another_one_replaces_is_not_read(tmp_path):
    """
    A file that lists its recurrent layers may say anything about their distance.
    """
    values: Mapping[str, object] = {
        "full_attention_interval": 0,
        "attention.recurrent_layers": [1, 0],
    }

    check_gguf(header(tmp_path, "qwen35", values))


def unsplit(folder: Path, arch: str, length: int) -> str:
    """A file of *arch* whose keys are not split, with *length* stated of split ones."""
    file = File(tensors=[Tensor(b"blk.1.attn_kv_b.weight", [1], 0, bytes(4))])
    file.values[b"general.architecture"] = encode(arch)
    for key in ("attention.key_length_mla", "attention.value_length_mla"):
        file.values[f"{arch}.{key}".encode()] = encode(length)
    path = folder / "model.gguf"
    path.write_bytes(file.encode())
    return str(path)


@pytest.mark.parametrize("arch", ["kimi-k3", "kimi-linear"])
def test_keys_that_are_not_split_need_lengths_of_zero(tmp_path, arch):
    """
    libllama keeps keys by the lengths, and computes them by the tensors: where the two
    disagree it would read what is not there.
    """
    with pytest.raises(ModelLoadFailed, match=r"blk\.1\.attn_k_b\.weight' is missing"):
        check_gguf(unsplit(tmp_path, arch, 32))

    check_gguf(unsplit(tmp_path, arch, 0))


@pytest.mark.parametrize("arch", INDEXED)
def test_some_layer_has_an_indexer_where_libllama_divides_by_its_width(tmp_path, arch):
    """
    Which layers have one is said by numbers, so a file may say that none has.
    """
    with pytest.raises(ModelLoadFailed, match=r"no layer has the tensor 'indexer"):
        check_gguf(unsplit(tmp_path, arch, 0))
