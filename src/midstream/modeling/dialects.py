"""Names and values that differ between a checkpoint on vLLM and on HuggingFace.

A block that uses the one's on the other is told what to write there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from midstream.errors import OutOfOrderError, UnsupportedError
from midstream.interleaving.node import Node
from midstream.interleaving.notes import annotate

_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that vLLM computes in one, in the order of their columns."""

_ENGINE: Mapping[str, str] = {
    "logits_processor": "Call the head itself: `model.lm_head(x)`",
    "sampler": "`model.samples` has the token that `generate` drew",
    "put": "Attach the module: `model.name = module`; a tensor is used by its name",
    "stored": "What a block needs is used by its name",
    "taps": "Every location is served, and no graphs are captured",
    "stats": "Nothing is counted in this process",
    "run": "Call `model.trace(...)` where the block is",
    "close": "Drop the last name of the model",
    "vllm_entrypoint": "`model.module` is the PyTorch module",
}
"""What only a `VLLM` has, and what to write on a local model."""

_ELSEWHERE: Mapping[str, str] = {
    "remote": (
        "there is no hosted service to send a block to. Leave it out, and the block runs in this "
        "process; a server of your own is named with `serve=`, of `VLLM`."
    ),
    "serve": (
        "this model is in your process. Leave it out; a midstream server is named by "
        "`VLLM(...).trace(..., serve=...)`."
    ),
}
"""Words that name another place for a block to run, with why there is none."""

_LOCAL = (
    *("attn_implementation", "feature_extractor", "generation_config", "image_processor"),
    *("load_adapter", "module", "pipe", "pipeline", "processor"),
)
"""What only a `TransformersModel` has."""

_REQUEST_FIELDS = ("outputs", "prompt_token_ids", "finished", "text", "token_ids")

_NO_PAIR = (
    "Here a layer returns the residual stream as one tensor, [batch, tokens, hidden]; the pair "
    "whose sum it is exists on vLLM. `sum(layer.output)` is [tokens, hidden] on both, for one row. "
    "Linear layers and norms, which return pairs there, return one tensor here too."
)
_PAIR = (
    "On vLLM a layer of many architectures returns a pair of tensors, [tokens, hidden], whose sum "
    "is the residual stream: `sum(layer.output)`. On HuggingFace it is one tensor."
)
_NO_BATCH = (
    "On vLLM a value has this request's tokens alone, [tokens, hidden], and no batch axis. "
    "`x[..., -1, :]` is the last token there and on HuggingFace."
)
_NO_SECOND = "index 1 is out of bounds for dimension 0 with size 1"  # PyTorch's texts
_WITHOUT_GRADIENTS = "does not require grad and does not have a grad_fn"
_NO_GRADIENTS = (
    "Nothing is recorded for gradients under `torch.no_grad()` and in `generate`: use "
    "`model.trace(...)` outside of it, with a loss that is computed from the model's values."
)
_NO_REQUEST = (
    "Here `tracer.result` is what the call returned: of `generate` the token ids, [rows, tokens], "
    "of a trace the model's output. A RequestOutput exists on vLLM."
)

_NO_TOKEN = (
    "A trace is one forward and draws no token. `with model.generate(...):` draws them, here and "
    "on vLLM, though not under beam search."
)


def refuse_elsewhere(keywords: Iterable[str]) -> None:
    """Refuse words that name another place for a block to run.

    Raises:
        UnsupportedError: one of them is there.
    """
    for name in keywords:
        if name in _ELSEWHERE:
            raise UnsupportedError(f"{name}= is not supported: {_ELSEWHERE[name]}")


def engine_name(node: Node, name: str) -> str:
    """What to write for a name of vLLM's tree that a local model has not; empty for any other."""
    parts = _FUSED.get(name)
    if parts is not None and _has(node, parts):
        return f" vLLM computes {_listed(parts)} in one as '{name}'; here they are apart."
    if name == "attn" and _has(node, ["o_proj"]):
        return (
            " On vLLM 'attn' is the kernel that q, k and v meet in; here that is an operation of "
            f"this module's forward, which `{_last(node)}.source` lists."
        )
    if not node.path and name in _ENGINE:
        return f" '{name}' belongs to engines of vLLM. {_ENGINE[name]}."
    return ""


def local_name(node: Node, name: str) -> str:
    """What to write for a name of HuggingFace's tree that vLLM's has not; empty for any other."""
    for fused, parts in _FUSED.items():
        if name in parts and _has(node, [fused]):
            return f" vLLM computes {_listed(parts)} in one: its columns are in '{fused}', in turn."
    if not node.path and name in _LOCAL:
        return f" '{name}' belongs to `TransformersModel`; `model.transformers()` gives one."
    return ""


def advise_local(error: BaseException) -> None:
    """Note on the error of a block on a local model what its values are, if it took them wrong."""
    text = _text(error)
    if isinstance(error, ValueError) and "values to unpack (expected 2" in text:
        annotate(error, _NO_PAIR)
    if isinstance(error, IndexError) and text.startswith(_NO_SECOND):
        annotate(error, _NO_PAIR)
    if isinstance(error, RuntimeError) and text.endswith(_WITHOUT_GRADIENTS):
        annotate(error, _NO_GRADIENTS)
    if type(error) is AttributeError and error.name in _REQUEST_FIELDS:
        annotate(error, _NO_REQUEST)
    if isinstance(error, OutOfOrderError) and text.startswith("'model.samples"):
        annotate(error, _NO_TOKEN)


def advise_engine(error: BaseException) -> None:
    """Note on the error of a block on vLLM what its values are, if it took them wrong."""
    text = _text(error)
    if text.startswith(("tuple indices must be", "'tuple' object has no attribute")):
        annotate(error, _PAIR)
    if isinstance(error, IndexError) and "too many indices for tensor of dimension 2" in text:
        annotate(error, _NO_BATCH)


def _has(node: Node, names: Iterable[str]) -> bool:
    children = {_last(child) for child in node}
    return all(name in children for name in names)


def _last(node: Node) -> str:
    return node.path.rpartition(".")[2]


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


_args: Any = BaseException.__dict__["args"]
"""Read past what an exception's own class makes of the name: a block may raise anything."""


def _text(error: BaseException) -> str:
    args = _args.__get__(error)
    return args[0] if args and type(args[0]) is str else ""
