"""Which HuggingFace tensor each vLLM module must receive and return, one table per architecture.

A layer's tensors carry architecture-independent names (`attn_in`, `z`, `mlp_out`, ...). The
`sources` table says at which HuggingFace module each is found, `derive` computes the fused ones,
and the `calls` tables say with which of them vLLM calls each of its modules and what it returns.
The calls follow the model definitions of vLLM 0.32 on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["ARCHITECTURES", "Architecture", "Call", "join"]

Values = Mapping[str, Any]

NONE = "-"
"""In a call: the value is Python's None on vLLM."""


@dataclass(frozen=True)
class Call:
    """One call of a vLLM module, as names of tensors.

    `inputs` lists positional names and ``keyword=name`` pairs; `output` is one name for a plain
    tensor, several for a tuple. ``-`` stands for None.
    """

    inputs: str
    output: str

    def arguments(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the (args, kwargs) of the call."""
        words = [word.rpartition("=") for word in self.inputs.split()]
        args = tuple(_look_up(name, values) for key, _, name in words if not key)
        return args, {key: _look_up(name, values) for key, _, name in words if key}

    def result(self, values: Values) -> Any:
        """Return what the call returns: a tensor or a tuple."""
        found = tuple(_look_up(name, values) for name in self.output.split())
        return found if len(found) > 1 else found[0]


def join(path: str, name: str) -> str:
    """Join two dotted paths, either of which may be empty."""
    return ".".join(part for part in (path, name) if part)


def _look_up(name: str, values: Values) -> Any:
    return None if name == NONE else values[name]


@dataclass(frozen=True)
class Architecture:
    """How one HuggingFace architecture appears in vLLM.

    `roles` names the HuggingFace modules that changes apply to (``{}`` is the layer); `sources`
    holds ``path.input`` or ``path.output`` relative to a layer. `first_layer` overrides `layer`
    for layer 0. `shared` modules are one object for all layers. `uncalled` modules exist in vLLM's
    tree but never run; the text says why.
    """

    roles: Mapping[str, str]
    sources: Mapping[str, str]
    derive: Callable[[Values, Values], dict[str, Tensor]]
    layer: Mapping[str, Call]
    ends: Mapping[str, Call]
    first_layer: Mapping[str, Call] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    uncalled: Mapping[str, str] = field(default_factory=dict)

    def layer_path(self, layer: int, name: str) -> str:
        """Return the full path of a layer's module, or of the layer itself for ``""``."""
        return join(self.roles["layer"].format(layer), name)

    def calls(self, layer: int) -> Mapping[str, Call]:
        """Return the calls of a layer's modules by their path inside the layer."""
        return {**self.layer, **(self.first_layer if layer == 0 else {})}


def _derive_rotary(layer: Values, trunk: Values) -> dict[str, Tensor]:
    """Fuse q, k, v and gate, up as vLLM does, and rotate q and k."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = trunk["rotary"]  # each [tokens, head_dim]
    q = layer.get("q_normed", layer["q_proj"]).flatten(1)
    k = layer.get("k_normed", layer["k_proj"]).flatten(1)
    by_head = (x.unflatten(1, (-1, cos.shape[-1])) for x in (q, k))
    q_rotated, k_rotated = apply_rotary_pos_emb(*by_head, cos, sin, unsqueeze_dim=1)
    return {
        "qkv": torch.cat([layer["q_proj"], layer["k_proj"], layer["v"]], dim=-1),
        "gate_up": torch.cat([layer["gate"], layer["up"]], dim=-1),
        "q": q,
        "k": k,
        "q_rotated": q_rotated.flatten(1),
        "k_rotated": k_rotated.flatten(1),
    }


def _derive_fused(layer: Values, trunk: Values) -> dict[str, Tensor]:
    """Split the fused projection of q, k and v."""
    return dict(zip("qkv", layer["qkv"].chunk(3, dim=-1), strict=True))


_ROTARY = Architecture(
    roles={
        "trunk": "model",
        "layer": "model.layers.{}",
        "mlp": "model.layers.{}.mlp",
        "embedding": "model.embed_tokens",
        "rotary": "model.rotary_emb",
        "norm": "model.norm",
    },
    sources={
        "stream_in": "input",
        "attn_in": "input_layernorm.output",
        "q_proj": "self_attn.q_proj.output",
        "k_proj": "self_attn.k_proj.output",
        "v": "self_attn.v_proj.output",
        "z": "self_attn.o_proj.input",
        "attn_out": "self_attn.output",
        "stream_mid": "post_attention_layernorm.input",
        "mlp_in": "post_attention_layernorm.output",
        "gate": "mlp.gate_proj.output",
        "up": "mlp.up_proj.output",
        "neurons": "mlp.down_proj.input",
        "mlp_out": "mlp.output",
        "stream_out": "output",
    },
    derive=_derive_rotary,
    # `hidden` and `residual` are what the layer before returned: its MLP output and its
    # stream before that output was added. The norms add them up.
    layer={
        "": Call("positions hidden residual", "mlp_out stream_mid"),
        "input_layernorm": Call("hidden residual", "attn_in stream_in"),
        "self_attn": Call("positions=positions hidden_states=attn_in", "attn_out"),
        "self_attn.qkv_proj": Call("attn_in", "qkv -"),
        "self_attn.rotary_emb": Call("positions q k", "q_rotated k_rotated"),
        "self_attn.attn": Call("q_rotated k_rotated v", "z"),
        "self_attn.o_proj": Call("z", "attn_out -"),
        "post_attention_layernorm": Call("attn_out stream_in", "mlp_in stream_mid"),
        "mlp": Call("mlp_in", "mlp_out"),
        "mlp.gate_up_proj": Call("mlp_in", "gate_up -"),
        "mlp.act_fn": Call("gate_up", "neurons"),
        "mlp.down_proj": Call("neurons", "mlp_out -"),
    },
    first_layer={
        "": Call("positions stream_in -", "mlp_out stream_mid"),
        "input_layernorm": Call("stream_in", "attn_in"),
    },
    ends={
        "": Call(
            "input_ids=ids positions=positions inputs_embeds=- intermediate_tensors=-", "normed"
        ),
        "model": Call("ids positions - -", "normed"),
        "model.embed_tokens": Call("ids", "embeddings"),
        "model.norm": Call("hidden residual", "normed stream_out"),
    },
    shared=("self_attn.rotary_emb",),
    uncalled={
        "self_attn.rotary_emb.apply_rotary_emb": "the rotary embedding calls its static function",
    },
)

_QK_NORM = replace(
    _ROTARY,
    sources={
        **_ROTARY.sources,
        "q_by_head": "self_attn.q_norm.input",
        "k_by_head": "self_attn.k_norm.input",
        "q_normed": "self_attn.q_norm.output",
        "k_normed": "self_attn.k_norm.output",
    },
    layer={
        **_ROTARY.layer,
        "self_attn.q_norm": Call("q_by_head", "q_normed"),
        "self_attn.k_norm": Call("k_by_head", "k_normed"),
    },
)

_GPT2 = Architecture(
    roles={
        "trunk": "transformer",
        "layer": "transformer.h.{}",
        "mlp": "transformer.h.{}.mlp",
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
    },
    sources={
        "stream_in": "input",
        "attn_in": "ln_1.output",
        "qkv": "attn.c_attn.output",
        "z": "attn.c_proj.input",
        "attn_out": "attn.output",
        "stream_mid": "ln_2.input",
        "mlp_in": "ln_2.output",
        "fc": "mlp.c_fc.output",
        "neurons": "mlp.c_proj.input",
        "mlp_out": "mlp.output",
        "stream_out": "output",
    },
    derive=_derive_fused,
    layer={
        "": Call("stream_in", "stream_out"),
        "ln_1": Call("stream_in", "attn_in"),
        "attn": Call("hidden_states=attn_in", "attn_out"),
        "attn.c_attn": Call("attn_in", "qkv -"),
        "attn.attn": Call("q k v", "z"),
        "attn.c_proj": Call("z", "attn_out -"),
        "ln_2": Call("stream_mid", "mlp_in"),
        "mlp": Call("mlp_in", "mlp_out"),
        "mlp.c_fc": Call("mlp_in", "fc -"),
        "mlp.act": Call("fc", "neurons"),
        "mlp.c_proj": Call("neurons", "mlp_out -"),
    },
    ends={
        "": Call(
            "input_ids=ids positions=positions inputs_embeds=- intermediate_tensors=-", "normed"
        ),
        "transformer": Call("ids positions - -", "normed"),
        "transformer.wte": Call("ids", "embeddings"),
        "transformer.wpe": Call("positions", "position_embeddings"),
        "transformer.ln_f": Call("stream_out", "normed"),
    },
    shared=("mlp.act",),
)

ARCHITECTURES: Mapping[str, Architecture] = {"llama": _ROTARY, "qwen3": _QK_NORM, "gpt2": _GPT2}
"""Architecture by the checkpoint's `model_type`."""
