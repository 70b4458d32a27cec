"""A checkpoint of transformers: its module with and without weights, and what lies beside it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from midstream.modeling.spellings import refuse_engine_only
from midstream.modeling.transformers import adapters
from midstream.modeling.transformers.parts import Parts, given_parts, hub_arguments
from midstream.modeling.transformers.quantisation import (
    check_dtype,
    is_quantisation,
    quantisation_config,
)
from midstream.modeling.transformers.tasks import (
    auto_class,
    check_task,
    infer,
    task_of_module,
)

_LOADING = (  # keywords of from_pretrained that are no fields of a configuration
    "attn_implementation",
    "device_map",
    "dtype",
    "experts_implementation",
    "offload_folder",
    "max_memory",
    "quantization_config",
    "torch_dtype",
    "use_safetensors",
    "weights_only",
)


class Checkpoint(Parts):
    """A checkpoint, or a ready module, that is loaded when it is first needed.

    Args:
        source: repository id, folder, or a ready `torch.nn.Module`.
        task: a task of `transformers.pipeline` ("text-generation", "fill-mask", ...), which
            chooses the class of the model. None: by the architecture in the configuration, or by
            the class of a ready module.
        tokenizer: an object, or where to load one from; None: the checkpoint's. An object that is
            passed is never changed; one that is loaded pads with its end-of-sequence token where
            it has no padding token.
        processor: as `tokenizer`.
        image_processor: as `tokenizer`.
        feature_extractor: as `tokenizer`.
        peft: folder or repository id of an adapter, attached after loading.
        revision: branch, tag or commit of the repository.
        from_pretrained: keywords of `from_pretrained` (dtype, device_map, attn_implementation,
            trust_remote_code, config, quantization_config, ...). `dtype` also takes the name of a
            quantisation: nf4, fp4, int4, 4bit, int8, 8bit, fp8.

    Raises:
        TypeError: loading keywords for a module that is loaded, or two ways to quantise.
        ValueError: an unknown task or dtype.
        ImportError: a quantisation or an adapter whose package is not installed.
        UnsupportedError: (with the configuration) an argument that only engines of vLLM have.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | torch.nn.Module,
        *,
        task: str | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        image_processor: Any = None,
        feature_extractor: Any = None,
        peft: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        **from_pretrained: Any,
    ):
        self._task = None if task is None else check_task(task)
        self.revision = revision
        self._ready = isinstance(source, torch.nn.Module)
        self._module = source if isinstance(source, torch.nn.Module) else None
        self._empty: torch.nn.Module | None = None
        self.repo_id = _name_of(source)
        self._arguments = self._checked(from_pretrained)
        self._parts = given_parts(
            processor,
            tokenizer=tokenizer,
            image_processor=image_processor,
            feature_extractor=feature_extractor,
        )
        self._config: Any = None
        self._unused: dict[str, Any] = {}
        self._adapter: str | None = None
        if peft is not None:
            self.load_adapter(peft)

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self._ready and (arguments or self.revision):
            names = ", ".join([*arguments, *(["revision"] if self.revision else [])])
            raise TypeError(f"{names}: the module is loaded; pass these to its from_pretrained.")
        checked = dict(arguments)
        if "torch_dtype" in checked:
            checked.setdefault("dtype", checked.pop("torch_dtype"))
        check_dtype(checked.get("dtype"))
        if is_quantisation(checked.get("dtype")):
            if checked.get("quantization_config") is not None:
                raise TypeError(
                    f"dtype={checked['dtype']!r} and quantization_config are two ways to quantise: "
                    "pass one."
                )
            checked["quantization_config"] = quantisation_config(checked.pop("dtype"))
        return checked

    # --- the module -------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Whether the module with its weights is there."""
        return self._module is not None

    def empty(self) -> torch.nn.Module:
        """The module on the meta device, made from the configuration; no weights are read.

        Its paths are those of the loaded module, except where a quantisation replaces modules.
        A module that is ready, or loaded, is given as it is.

        Raises:
            ValueError: the configuration does not say which class the model is of.
        """
        if self._module is not None:
            return self._module
        if self._empty is None:
            config = copy.deepcopy(self.config)  # building writes the dtype into it
            with torch.device("meta"):
                self._empty = auto_class(self._task, config).from_config(config, **self._building())
            self._empty.eval()
            self._adapt()
        return self._empty

    def load(self) -> torch.nn.Module:
        """The module with its weights, loaded once, in evaluation mode.

        It is where `from_pretrained` puts it: on the CPU, or as `device_map` says.

        Raises:
            ValueError: the configuration does not say which class the model is of.
            OSError: transformers' own, for a checkpoint that is not there.
        """
        if self._module is None:
            self._module = self._from_pretrained()
            self._empty = None
            self._adapt()
        return self._module

    def _from_pretrained(self) -> torch.nn.Module:
        loading = {name: self._arguments[name] for name in _LOADING if name in self._arguments}
        module: torch.nn.Module = auto_class(self._task, self.config).from_pretrained(
            self.repo_id, **{**self._hub(), **self._unused, **loading, "config": self.config}
        )
        if "generation_config" in self._parts and module.can_generate():  # type: ignore[operator]
            module.generation_config = self._parts["generation_config"]
        return module

    def _building(self) -> dict[str, Any]:
        """Keywords of `from_config`."""
        names = ("attn_implementation", "experts_implementation", "trust_remote_code")
        found = {name: self._arguments[name] for name in names if name in self._arguments}
        dtype = self._arguments.get("dtype")
        if dtype is not None and dtype != "auto" and not isinstance(dtype, dict):
            found["dtype"] = dtype
        return found

    def _hub(self) -> dict[str, Any]:
        names = ("trust_remote_code", "code_revision")
        more = {name: self._arguments[name] for name in names if name in self._arguments}
        return {**hub_arguments({**self._arguments, "revision": self.revision}), **more}

    def load_adapter(self, adapter: str | os.PathLike[str] | None) -> None:
        """Attach an adapter, in place of the one there is; None takes it off.

        Before loading it is attached when the module is loaded. The tree of modules changes:
        layers that are adapted are found below the adapter's (``q_proj.base_layer``).

        Raises:
            ImportError: PEFT is not installed.
        """
        name = None if adapter is None else os.fspath(adapter)
        if name is not None:
            adapters.check_installed()
        self._adapter = None
        module = self._module if self._module is not None else self._empty
        if module is not None:
            adapters.detach(module)
        self._adapter = name
        self._adapt()

    def _adapt(self) -> None:
        """Attach the adapter that there is to be to the module that there is."""
        if self._adapter is None:
            return
        if self._module is not None:
            adapters.attach(self._module, self._adapter)
        elif self._empty is not None:
            adapters.attach_empty(self._empty, self._adapter)

    @property
    def adapter(self) -> str | None:
        """Folder or repository id of the adapter that is attached, or will be."""
        return self._adapter

    @property
    def attn_implementation(self) -> str | None:
        """Name of the attention's implementation ("eager", "sdpa", ...); can be assigned."""
        module = self._module if self._module is not None else self.empty()
        found: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
        return found

    @attn_implementation.setter
    def attn_implementation(self, name: str) -> None:
        for module in (self._module, self._empty):
            if module is not None:
                module.set_attn_implementation(name)  # type: ignore[operator]
        if not self._ready:
            self._arguments["attn_implementation"] = name

    # --- what lies beside it ----------------------------------------------------------------------

    @property
    def task(self) -> str | None:
        """The task; None for a class that no task uses.

        Raises:
            ValueError: it was not given, and neither configuration nor class say it.
        """
        if self._task is None:
            self._task = task_of_module(self._module) if self._ready else infer(self.config)[1]
        return self._task

    @property
    def config(self) -> Any:
        """The configuration; the loaded module's own once there is one."""
        if self._module is not None:
            return getattr(self._module, "config", None)
        if self._config is None:
            self._config, self._unused = self._configured()
        return self._config

    def _configured(self) -> tuple[Any, dict[str, Any]]:
        """The configuration with the fields that keywords set, and the keywords that are none."""
        from transformers import AutoConfig, PreTrainedConfig

        given = self._arguments.get("config")
        skipped = (*_LOADING, *self._hub(), "config")
        rest = {name: value for name, value in self._arguments.items() if name not in skipped}
        if isinstance(given, PreTrainedConfig):
            refuse_engine_only(rest)
            return given, rest
        source = self.repo_id if given is None else os.fspath(given)
        with _named(source):
            config, unused = AutoConfig.from_pretrained(
                source, return_unused_kwargs=True, **self._hub(), **rest
            )
        found = {name: unused[name] for name in rest if name in unused}
        refuse_engine_only(found)  # a configuration may have a field of that name
        return config, found

    @property
    def generation_config(self) -> Any:
        """The settings that `generate` starts from, or None; the loaded module's own."""
        if self._module is not None:
            return getattr(self._module, "generation_config", None)
        return self._part("generation_config")


@contextmanager
def _named(source: str | None) -> Iterator[None]:
    """Say what was looked for: where there is no network transformers' error does not."""
    try:
        yield
    except OSError as error:
        error.add_note(f"Loading {source!r}.")
        raise


def _name_of(source: Any) -> str | None:
    """Repository id or folder; of a ready module where it was loaded from, or None."""
    if isinstance(source, torch.nn.Module):
        name: str | None = getattr(getattr(source, "config", None), "name_or_path", None)
        return name or None
    return str(os.fspath(source))
