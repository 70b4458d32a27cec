"""The module tree of a checkpoint as vLLM builds it, without weights and without a GPU."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from midstream.errors import EngineBuildError, UnsupportedError
from midstream.modeling.vllm.arguments import POOLING

_ONE_RANK = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_size": 1,
}


def build(repo: str, arguments: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    """Build the tree on the meta device.

    Args:
        repo: checkpoint folder or repository id.
        arguments: the engine's arguments; parallel sizes are taken as 1.

    Returns:
        The root module, and vLLM's model configuration.

    Raises:
        EngineBuildError: vLLM refuses the checkpoint or the arguments, or the settings select its
            older model runner.
        UnsupportedError: vLLM would run the checkpoint as a pooling model.
    """
    fixed = {**_ONE_RANK, "enforce_eager": True, "load_format": "dummy"}
    for name in ("distributed_executor_backend", "worker_cls", "scheduler_cls"):
        arguments = {key: value for key, value in arguments.items() if key != name}
    try:
        return _build({**arguments, **fixed, "model": repo})
    except (EngineBuildError, UnsupportedError):
        raise
    except Exception as error:
        raise EngineBuildError(
            f"vLLM cannot set up the model {repo!r}: {type(error).__name__}: {error}"
        ) from error


def _build(arguments: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**arguments).create_engine_config()
    if config.model_config.runner_type != "generate":
        raise UnsupportedError(POOLING)
    refuse_old_runner(config)
    with _one_rank_group(config):
        return _initialize(config), config.model_config


def refuse_old_runner(config: Any) -> None:
    """Refuse a configuration for which vLLM picks its older model runner.

    Raises:
        EngineBuildError: naming the features that make it do so.
    """
    why = ", ".join(config._get_v2_model_runner_unsupported_features())
    if why:
        raise EngineBuildError(
            f"vLLM picks its older model runner for these settings ({why}), "
            "and midstream does not work with that one. Leave the named features out."
        )


def _initialize(config: Any) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        _own_rotary_embeddings(rotary_embedding._ROPE_DICT),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
    ):
        # A definition that makes tensors when it is imported would have them on the meta device,
        # for good, and an engine that is forked from here, or runs here, would compute with them.
        get_model_architecture(config.model_config)
        with _own_classes(), torch.device("meta"), _ReadableMeta():
            root: torch.nn.Module = initialize_model(vllm_config=config)
    return root.eval()


@contextmanager
def _own_classes() -> Iterator[None]:
    """Give classes of transformers back what vLLM's Transformers backend changes in them.

    It has them compiled by vLLM, and refuse to be made outside of it: no HuggingFace model of that
    architecture could be loaded in this process. What an engine in this process changed stays.
    """
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Compiled

    before = _compiled_classes(Compiled)
    try:
        yield
    finally:
        for kind in _compiled_classes(Compiled) - before:
            _undecorate(kind, Compiled)


def _undecorate(kind: Any, compiled: type) -> None:
    kind.__init__ = inspect.getclosurevars(kind.__init__).nonlocals["old_init"]
    kind.__bases__ = tuple(base for base in kind.__bases__ if base is not compiled)
    del kind.__call__


def _compiled_classes(compiled: Any) -> set[Any]:
    from transformers import PreTrainedModel

    return {kind for kind in compiled.__subclasses__() if issubclass(kind, PreTrainedModel)}


@contextmanager
def _own_rotary_embeddings(shared: dict[Any, Any]) -> Iterator[None]:
    """Keep the tree's rotary embeddings apart from an engine's: vLLM shares them process-wide."""
    before = dict(shared)
    shared.clear()
    try:
        yield
    finally:
        shared.clear()
        shared.update(before)


_READING = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu)


class _ReadableMeta(TorchFunctionMode):
    """Has meta tensors hold zeros for who reads them: some models read values back when built."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _READING and args[0].is_meta:
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def _one_rank_group(config: Any) -> Iterator[None]:
    """The parallel group that vLLM's layers ask for; taken down again at once."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        with _experts_group(config):
            yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def _experts_group(config: Any) -> Iterator[None]:
    """The group that experts ask for, where an engine without experts runs in this process."""
    from vllm.distributed import parallel_state

    if not config.model_config.is_moe or parallel_state._EP is not None:
        yield
        return
    parallel_state._EP = parallel_state.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")
    try:
        yield
    finally:
        parallel_state._EP.destroy()
        parallel_state._EP = None
