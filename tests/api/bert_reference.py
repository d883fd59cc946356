"""A BERT with a head in 64 bits, by numpy: what scores would be if nothing was rounded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader


class BertReference:
    def __init__(self, path: Path) -> None:
        file = GGUFReader(path)
        self._tensors = {t.name: np.array(t.data, np.float64) for t in file.tensors}

        def fact(name: str) -> Any:
            return file.fields[f"bert.{name}"].parts[-1][0]

        self._n_heads = int(fact("attention.head_count"))
        self._n_layers = int(fact("block_count"))
        self._epsilon = float(fact("attention.layer_norm_epsilon"))

    def scores(self, tokens: Sequence[int]) -> np.ndarray:
        """Those of the head, which reads the first token."""
        t = self._tensors
        x = t["token_embd.weight"][list(tokens)]
        x = x + t["position_embd.weight"][: len(tokens)]
        x = self._norm(x + t["token_types.weight"][0], "token_embd_norm")
        for layer in range(self._n_layers):
            at = f"blk.{layer}"
            seen = self._product(self._attention(x, at), f"{at}.attn_output")
            x = self._norm(x + seen, f"{at}.attn_output_norm")
            wide = _gelu(self._product(x, f"{at}.ffn_up"))
            x = self._norm(
                x + self._product(wide, f"{at}.ffn_down"), f"{at}.layer_output_norm"
            )
        first = x[0]
        if "cls.weight" in t:
            first = np.tanh(self._product(first, "cls"))
        return self._product(first, "cls.output")

    def _attention(self, x: np.ndarray, at: str) -> np.ndarray:
        parts = (self._product(x, f"{at}.attn_{kind}") for kind in "qkv")
        q, k, v = (p.reshape(len(x), self._n_heads, -1).swapaxes(0, 1) for p in parts)
        weights = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        weights /= weights.sum(-1, keepdims=True)
        return (weights @ v).swapaxes(0, 1).reshape(len(x), -1)

    def _product(self, x: np.ndarray, name: str) -> np.ndarray:
        bias = self._tensors.get(f"{name}.bias", 0)
        return x @ self._tensors[f"{name}.weight"].T + bias

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self._epsilon)
        return x * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]


def _gelu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
