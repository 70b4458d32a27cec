"""A Llama in plain PyTorch, with modules called and joined as vLLM calls and joins them.

It is what hooks can be put on where vLLM's modules cannot be used: `test_mirror` shows that its
values are HuggingFace's. Flat rows, one request, keys and values kept from step to step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Maybe = Tensor | None


class Linear(nn.Module):
    """Several matrices as one; returns the product and the bias it has not added: None."""

    def __init__(self, *weights: Tensor):
        super().__init__()
        self.register_buffer("weight", torch.cat(weights))

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """``[rows, in]`` to ``[rows, out]``."""
        if rows.shape[-1] != self.weight.shape[1] or rows.dtype != self.weight.dtype:
            raise ValueError("width")
        return functional.linear(rows, self.weight), None


class Norm(nn.Module):
    """RMS norm, of a sum where it is given a residual, which it updates."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self._eps = eps

    def forward(self, rows: Tensor, residual: Maybe = None) -> Any:
        """Return the normed rows, and the sum if there is one."""
        rows = rows if residual is None else rows + residual
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self._eps)
        normed = rows * scale * self.weight
        return normed if residual is None else (normed, rows)


class Rotary(nn.Module):
    """Rotates queries and keys by their positions; one object for all layers."""

    def __init__(self, width: int, theta: float):
        super().__init__()
        self._width = width
        self._speed = theta ** -(torch.arange(0, width, 2) / width)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """``[rows, heads * width]`` each."""
        angle = positions[:, None].float() * self._speed
        cos, sin = (f(angle).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))

        def turned(x: Tensor) -> Tensor:
            x = x.unflatten(-1, (-1, self._width))
            low, high = x.chunk(2, -1)
            return (x * cos + torch.cat([-high, low], -1) * sin).flatten(1)

        return turned(q), turned(k)


class Attend(nn.Module):
    """Causal attention over all rows so far."""

    def __init__(self, width: int):
        super().__init__()
        self._width, self._past = width, ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[rows, heads * width]`` to the same."""
        past = self._past or (k[:0], v[:0])
        keys, values = torch.cat([past[0], k]), torch.cat([past[1], v])
        self._past = (keys, values)
        q, keys, values = (
            x.unflatten(-1, (-1, self._width)).movedim(1, 0) for x in (q, keys, values)
        )
        keys, values = (x.repeat_interleave(len(q) // len(x), 0) for x in (keys, values))
        mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool).tril(
            keys.shape[1] - q.shape[1]
        )
        scores = (q @ keys.mT * self._width**-0.5).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ values).movedim(0, 1).flatten(1)


class Attention(nn.Module):
    """One layer's attention."""

    def __init__(self, hf: Any, rotary: Rotary, width: int):
        super().__init__()
        self.qkv_proj = Linear(hf.q_proj.weight, hf.k_proj.weight, hf.v_proj.weight)
        self.rotary_emb, self.attn = rotary, Attend(width)
        self.o_proj = Linear(hf.o_proj.weight)
        self._sizes = [len(part.weight) for part in (hf.q_proj, hf.k_proj, hf.v_proj)]

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """``[rows, hidden]`` to the same."""
        q, k, v = self.qkv_proj(hidden_states)[0].split(self._sizes, -1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]  # type: ignore[no-any-return]


class Activation(nn.Module):
    """SiLU of the gate times the rest."""

    def forward(self, rows: Tensor) -> Tensor:
        """``[rows, 2 * width]`` to ``[rows, width]``."""
        gate, up = rows.chunk(2, -1)
        return functional.silu(gate) * up


class Mlp(nn.Module):
    """One layer's MLP."""

    def __init__(self, hf: Any):
        super().__init__()
        self.gate_up_proj = Linear(hf.gate_proj.weight, hf.up_proj.weight)
        self.act_fn, self.down_proj = Activation(), Linear(hf.down_proj.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """``[rows, hidden]`` to the same."""
        return self.down_proj(self.act_fn(self.gate_up_proj(rows)[0]))[0]  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A decoder layer that hands its residual on unsummed."""

    def __init__(self, hf: Any, rotary: Rotary, width: int, eps: float):
        super().__init__()
        self.self_attn, self.mlp = Attention(hf.self_attn, rotary, width), Mlp(hf.mlp)
        self.input_layernorm = Norm(hf.input_layernorm.weight, eps)
        self.post_attention_layernorm = Norm(hf.post_attention_layernorm.weight, eps)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Maybe) -> tuple[Tensor, Tensor]:
        """Return the MLP's output and the residual, ``[rows, hidden]`` each."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Trunk(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, hf: Any, config: Any):
        super().__init__()
        rotary = Rotary(config.head_dim, config.rope_parameters["rope_theta"])
        self.embed_tokens = nn.Embedding.from_pretrained(hf.embed_tokens.weight.detach())
        self.layers = nn.ModuleList(
            Layer(layer, rotary, config.head_dim, config.rms_norm_eps) for layer in hf.layers
        )
        self.norm = Norm(hf.norm.weight, config.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """``[rows]`` ids and positions to ``[rows, hidden]``."""
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]  # type: ignore[no-any-return]


class Mirror(nn.Module):
    """The model.

    Args:
        hf: HuggingFace's model, whose weights it takes.
    """

    def __init__(self, hf: Any):
        super().__init__()
        self.model = Trunk(hf.model, hf.config)
        self.requires_grad_(False)
        self.head = hf.lm_head.weight.detach()
        self._seen = 0

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """``[rows]`` ids and positions to ``[rows, hidden]``."""
        return self.model(ids, positions)  # type: ignore[no-any-return]

    def step(self, ids: Tensor) -> Tensor:
        """Run the next rows of the request; the last one's final hidden state, ``[1, hidden]``."""
        positions = torch.arange(self._seen, self._seen + len(ids))
        self._seen += len(ids)
        return self(ids, positions)[-1:]  # type: ignore[no-any-return]
