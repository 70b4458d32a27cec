"""Places of a Llama in vLLM's tree, in the order of the forward."""

from __future__ import annotations

from tests.fuzz.sites import INPUT, PAIR, Leaves, Site, in_order

LAYERS = 4
_WITH_NONE: Leaves = (("[0]", "rows"),)


def _layer(i: int) -> list[Site]:
    """One layer; the first has no residual yet."""
    path, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
    stream: Leaves = (("[0][1]", "rows"), *((("[0][2]", "rows"),) if i else ()))
    hidden: Leaves = (("[1]['positions']", "numbers"), ("[1]['hidden_states']", "rows"))
    rotary = f"{attention}.rotary_emb"
    return [
        Site(path, "inputs", (("[0][0]", "numbers"), *stream)),
        Site(f"{path}.input_layernorm", "input"),
        _pair(f"{path}.input_layernorm") if i else Site(f"{path}.input_layernorm", "output"),
        Site(attention, "inputs", hidden),
        Site(f"{attention}.qkv_proj", "input"),
        Site(f"{attention}.qkv_proj", "output", _WITH_NONE, "({0}, None)"),
        *([] if i else [_pair(rotary)]),  # of its calls, the first is served
        Site(f"{attention}.attn", "output"),
        Site(f"{attention}.o_proj", "inputs", INPUT, "(({0},), {{}})"),
        Site(f"{attention}.o_proj", "output", _WITH_NONE, "({0}, None)"),
        Site(attention, "output"),
        _pair(f"{path}.post_attention_layernorm"),
        Site(f"{path}.mlp", "input"),
        Site(f"{path}.mlp.gate_up_proj", "output", _WITH_NONE, "({0}, None)"),
        Site(f"{path}.mlp.act_fn", "output"),
        Site(f"{path}.mlp.down_proj", "input"),
        Site(f"{path}.mlp", "output"),
        _pair(path),
    ]


def _pair(path: str) -> Site:
    return Site(path, "output", PAIR, "({0}, {1})")


LLAMA = in_order(
    [
        Site("model.embed_tokens", "input", (("", "numbers"),)),
        Site("model.embed_tokens", "output"),
        *(site for i in range(LAYERS) for site in _layer(i)),
        _pair("model.norm"),
        Site("model", "output"),
        Site("", "output"),
        Site("lm_head", "output"),  # vLLM never calls it
        Site("logits_processor", "output"),
        Site("", "logits"),
        Site("", "samples", (("", "numbers"),)),
    ]
)
"""Places of T-LLAMA."""
