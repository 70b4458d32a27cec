"""Keywords that only one of vLLM and HuggingFace has, with what to write on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from midstream.errors import UnsupportedError

_NO_LIMIT = "what is traced is bounded by the memory alone: leave it out"
_NO_SCHEDULER = "the rows of a batch are those of one call's invokes: leave it out"
_NO_CACHE = "no memory is set aside for a cache: leave it out"
_DEVICES = "device_map= spreads the layers over several GPUs"
_EAGER = "every forward is eager: leave it out"
_NO_MEDIA = "blocks take text: `TransformersModel` takes images and sound"
_NO_BEAMS = "blocks have no beam search: leave it out, or search with `TransformersModel`"

ENGINE_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "attention_backend": "attn_implementation= chooses the attention",
        "batch_invariant": "leave it out",
        "block_size": _NO_CACHE,
        "block_timeout": _NO_LIMIT,
        "compilation_config": _EAGER,
        "enable_chunked_prefill": _NO_SCHEDULER,
        "enable_lora": "peft= or `model.load_adapter(...)` attaches an adapter",
        "enable_prefix_caching": _NO_SCHEDULER,
        "enforce_eager": _EAGER,
        "gpu_memory_utilization": _NO_CACHE,
        "kv_cache_dtype": _NO_CACHE,
        "kv_cache_memory_bytes": _NO_CACHE,
        "load_format": "use_safetensors= chooses the files",
        "max_model_len": _NO_LIMIT,
        "max_num_batched_tokens": _NO_SCHEDULER,
        "max_num_seqs": _NO_SCHEDULER,
        "max_save_bytes": _NO_LIMIT,
        "max_snapshot_bytes": _NO_LIMIT,
        "mode": "calls return when they are done: leave it out",
        "pipeline_parallel_size": _DEVICES,
        "quantization": "dtype= takes the name of one ('nf4', 'int8', 'fp8', ...)",
        "seed": "it is a setting of `model.generate(...)`",
        "taps": "every location is served, and no graphs are captured: leave it out",
        "tensor_parallel_size": _DEVICES,
    }
)
"""Arguments of engines, with what to do where a HuggingFace model is loaded."""

LOCAL_ONLY: Mapping[str, str] = MappingProxyType(
    {
        # of loading
        "attn_implementation": "attention_backend= chooses the attention",
        "device_map": "an engine runs on one GPU, which CUDA_VISIBLE_DEVICES chooses",
        "feature_extractor": _NO_MEDIA,
        "image_processor": _NO_MEDIA,
        "load_in_4bit": "quantization= names what the checkpoint is quantised by",
        "load_in_8bit": "quantization= names what the checkpoint is quantised by",
        "low_cpu_mem_usage": "leave it out",
        "peft": "pass enable_lora=True, and lora_request= to a trace",
        "processor": _NO_MEDIA,
        "torch_dtype": "pass dtype=",
        # of inputs
        "attention_mask": "pass the tokenizer's whole output as the prompt",
        "audio": _NO_MEDIA,
        "images": _NO_MEDIA,
        "input_ids": "pass the ids as the prompt",
        "pixel_values": _NO_MEDIA,
        "position_ids": "positions are counted from 0: leave it out",
        "videos": _NO_MEDIA,
        # of generation
        "bad_words_ids": "pass bad_words=, which takes texts",
        "do_sample": "a temperature above 0 samples, and 0 is greedy",
        "eos_token_id": "pass stop_token_ids=",
        "logits_processor": "write `model.logits` in the block",
        "max_length": "pass max_tokens=, which counts new tokens alone",
        "min_new_tokens": "pass min_tokens=",
        "num_beams": _NO_BEAMS,
        "num_return_sequences": "pass n=",
        "output_attentions": "read the attention's values in the block",
        "output_hidden_states": "read `layer.output` in the block",
        "output_logits": "pass logprobs=, or read `model.logits` in the block",
        "output_scores": "pass logprobs=, or read `model.logits` in the block",
        "return_dict_in_generate": "`tracer.result` has the whole result: leave it out",
        "sequence_bias": "pass logit_bias=",
        "stop_strings": "pass stop=",
        "use_cache": "the cache is always used: leave it out",
    }
)
"""Keywords of loading, inputs and generation on HuggingFace, with what to do on vLLM."""


def refuse_engine_only(names: Iterable[str]) -> None:
    """Refuse an argument of engines where a HuggingFace model is loaded.

    Raises:
        UnsupportedError: naming it, and what to do here.
    """
    for name in names:
        if name in ENGINE_ONLY:
            raise UnsupportedError(f"{name}= exists on vLLM only. Here, {ENGINE_ONLY[name]}.")


def on_engine(name: str) -> str:
    """What to write on vLLM for a keyword of HuggingFace, as the end of a text; else empty."""
    found = LOCAL_ONLY.get(name)
    return f" It exists on HuggingFace only. Here, {found}." if found else ""
