"""A checkpoint's arithmetic written out from its stored weights, apart from HuggingFace's."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tests.support.checkpoints import A, checkpoint
from tests.support.oracle import Oracle

__all__ = ["HEAD_DIM", "Subject", "attend", "heads", "rotate"]

HEAD_DIM = 64


class Subject:
    """One checkpoint: its oracle, the reads of prompt A, and its weights."""

    def __init__(self, name: str):
        folder: Path = checkpoint(name)
        self.name = name
        self.oracle = Oracle(folder)
        self.reads = self.oracle.reads(A)
        self.weights = load_file(folder / "model.safetensors")
        self.layer = "transformer.h.{}" if name == "T-GPT2" else "model.layers.{}"

    def at(self, layer: int, location: str) -> Any:
        """Return the value of a layer's location."""
        return self.reads[f"{self.layer.format(layer)}.{location}"]

    def linear(self, path: str, rows: Tensor) -> Tensor:
        """Project rows with the stored weight; only GPT-2 has biases and stores [in, out]."""
        weight, bias = self.weights[path + ".weight"], self.weights.get(path + ".bias")
        return rows @ weight + bias if bias is not None else rows @ weight.T

    def norm(self, path: str, rows: Tensor) -> Tensor:
        """Normalise rows with the stored gain: layer norm where it has a bias, else RMS norm."""
        weight, bias = self.weights[path + ".weight"], self.weights.get(path + ".bias")
        if bias is not None:
            return functional.layer_norm(rows, rows.shape[-1:], weight, bias, 1e-5)
        return weight * rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def heads(rows: Tensor) -> Tensor:
    """Split [tokens, heads * 64] into [tokens, heads, 64]."""
    return rows.reshape(len(rows), -1, HEAD_DIM)


def rotate(rows: Tensor) -> Tensor:
    """Rotate [tokens, heads * 64] by position: element i pairs with element i + 32."""
    x, y = heads(rows).chunk(2, dim=-1)
    frequency = 10000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angle = torch.arange(len(rows))[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1).flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Grouped-query attention of [tokens, heads * 64] rows: each kv head serves adjacent heads."""
    q, k, v = (heads(x).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = q @ k.mT / HEAD_DIM**0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    z: Tensor = scores.softmax(-1) @ v
    return z.transpose(0, 1).flatten(1)
