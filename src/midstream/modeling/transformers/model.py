"""`TransformersModel`: a HuggingFace model whose forwards can be read and edited."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import LOGITS, SAMPLES
from midstream.interleaving.run import current_run
from midstream.modeling.base import Model
from midstream.modeling.capturing import opens_with
from midstream.modeling.dialects import refuse_elsewhere
from midstream.modeling.local.batching import Batch
from midstream.modeling.local.running import Running
from midstream.modeling.transformers import adapters
from midstream.modeling.transformers.decoding import drawing, hand_logits
from midstream.modeling.transformers.encodings import Encoding
from midstream.modeling.transformers.inputs import Inputs
from midstream.modeling.transformers.loading import Checkpoint
from midstream.modeling.transformers.settings import (
    check_forward,
    generation,
    seeded,
    split,
)


class TransformersModel(Model):
    """A HuggingFace model in this process.

    Without ``dispatch`` only the module tree is made, from the configuration; the first trace
    loads the weights. A ready module is taken as it is.

    Args:
        source: repository id, folder, or a ready `torch.nn.Module`.
        dispatch: load the weights now.
        rename: further names for modules: path ("model.layers") or last part of one ("layers") to
            a name or a list of names.
        loading: what chooses and loads the checkpoint (`task`, `tokenizer`, `processor`,
            `image_processor`, `feature_extractor`, `peft`, `revision`), and arguments of
            transformers' `from_pretrained` (`dtype`, `device_map`, `attn_implementation`, ...), see
            ``loading.Checkpoint``.

    Raises:
        ValueError: the task cannot be told or is unknown; or a further name that is taken.
        OSError: there is no such checkpoint.
        UnsupportedError: an argument that only engines of vLLM have.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | torch.nn.Module,
        *,
        dispatch: bool = False,
        rename: Mapping[str, str | list[str]] | None = None,
        **loading: Any,
    ):
        self._checkpoint = Checkpoint(source, **loading)
        super().__init__(self._checkpoint.empty(), rename=rename)
        self._after = hand_logits
        self._made: tuple[torch.nn.Module, Inputs] | None = None
        if dispatch:
            self.dispatch()

    # The checkpoint.

    @property
    def dispatched(self) -> bool:
        """Whether the weights are loaded."""
        return self._checkpoint.loaded

    def dispatch(self) -> None:
        """Load the weights, if they are not loaded."""
        with self._host.lock:
            module = self._checkpoint.load()
            if module is not self.module:
                self.tree.rebind(module)

    @property
    def repo_id(self) -> str | None:
        """Where the checkpoint is from; None for a module made here."""
        return self._checkpoint.repo_id

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of it."""
        return self._checkpoint.revision

    @property
    def task(self) -> str | None:
        """The task, by transformers' name for it."""
        return self._checkpoint.task

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self._checkpoint.config

    @property
    def generation_config(self) -> Any:
        """What `generate` does where its settings say nothing; None for what cannot generate."""
        return self._checkpoint.generation_config

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None."""
        return self._checkpoint.tokenizer

    @property
    def processor(self) -> Any:
        """The checkpoint's processor, or None."""
        return self._checkpoint.processor

    @property
    def image_processor(self) -> Any:
        """The checkpoint's image processor, or None."""
        return self._checkpoint.image_processor

    @property
    def feature_extractor(self) -> Any:
        """The checkpoint's feature extractor, or None."""
        return self._checkpoint.feature_extractor

    @property
    def attn_implementation(self) -> str | None:
        """Name of the attention's implementation ("eager", "sdpa", ...); can be assigned."""
        return self._checkpoint.attn_implementation

    @attn_implementation.setter
    def attn_implementation(self, name: str) -> None:
        self._checkpoint.attn_implementation = name

    def load_adapter(self, adapter: str | os.PathLike[str] | None) -> None:
        """Attach a PEFT adapter, in place of the one there is; None takes it off.

        Raises:
            ImportError: PEFT is not installed.
        """
        with self._host.lock:
            self._checkpoint.load_adapter(adapter)
            self.tree.rebind(self._checkpoint.empty())

    # Values.

    @property
    def logits(self) -> Any:
        """Logits of each row's last token, ``[rows, vocab]``: what `generate` draws from."""
        return current_run("`model.logits`").at(LOGITS).read()

    @logits.setter
    def logits(self, value: Any) -> None:
        run = current_run("`model.logits`")
        run.at(LOGITS).write(value, LOGITS.label(run.visit))

    @property
    def samples(self) -> Any:
        """The token ids that `generate` drew, ``[rows, 1]``, int64; not under beam search.

        A pipeline that generates draws them with `generate`.
        """
        return current_run("`model.samples`").at(SAMPLES).read()

    @samples.setter
    def samples(self, value: Any) -> None:
        run = current_run("`model.samples`")
        run.at(SAMPLES).write(value, SAMPLES.label(run.visit))

    # Calls.

    def generate(
        self, *inputs: Any, block: Callable[..., Any] | None = None, **keywords: Any
    ) -> Any:
        """Generate; in the header of a `with` statement, with a block beside each forward.

        Args:
            inputs: as of ``trace``.
            block: a function ``block(model, tracer)`` to run in place of a `with` body.
            keywords: inputs and settings: transformers' own words and vLLM's (`max_tokens`,
                `temperature`, `seed`, ...), see ``settings``. Without any, the checkpoint's
                settings hold, greedy unless they say otherwise.

        Returns:
            The token ids ``[rows, prompt + new]``, or what transformers gives instead where its
            settings ask for more; in a `with` statement the tracer, whose ``result`` that is.

        Raises:
            PromptError: an input that is none.
            TypeError: an unknown word.
            UnsupportedError: the model has no decoding loop; or a word of vLLM alone.
            InterventionError: a block failed (at the end of the `with`).
        """
        traced = block is not None or opens_with(sys._getframe(1))
        return self._begin("generate", inputs, keywords, block, trace=traced)

    def pipe(self, *inputs: Any, block: Callable[..., Any] | None = None, **keywords: Any) -> Any:
        """Run the task's whole pipeline of transformers; in a `with` header, with a block.

        Args:
            inputs, keywords: the pipeline's own.
            block: as of ``generate``.

        Returns:
            The pipeline's records; in a `with` statement the tracer, whose ``result`` they are.
        """
        traced = block is not None or opens_with(sys._getframe(1))
        return self._begin("pipe", inputs, keywords, block, trace=traced)

    @property
    def pipeline(self) -> Any:
        """Transformers' own pipeline for the task, around this model."""
        from transformers import pipeline

        self.dispatch()
        names = ("tokenizer", "processor", "image_processor", "feature_extractor")
        parts = {name: getattr(self, name) for name in names}
        given = {name: part for name, part in parts.items() if part is not None}
        return pipeline(self.task, model=self.module, **given)

    def _split(
        self, way: str, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        refuse_elsewhere(keywords)
        if way == "pipe":
            return super()._split(way, args, keywords)
        inputs, settings = split(keywords, self._encoder.signature, generate=way == "generate")
        if way != "generate":
            check_forward(settings)
        return self._encoded(args, inputs), settings

    def _inputs(
        self,
        way: str,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> Any:
        if way == "pipe":
            return super()._inputs(way, args, keywords, settings)
        given, own = self._split(way, args, keywords)
        if own:
            raise UnsupportedError(
                f"{', '.join(own)}: all invokes run in one call, so its settings belong into "
                f"`model.{way}(...)`. For others, trace once more."
            )
        return given

    def _encoded(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Encoding | None:
        return self._encoder.encode(*args, **inputs) if args or inputs else None

    @property
    def _encoder(self) -> Inputs:
        """Makes inputs of what users pass, for the module as it is now."""
        if self._made is None or self._made[0] is not self.module:
            self._made = self.module, Inputs(self.module, self._checkpoint)
        return self._made[1]

    def _batch(self, way: str, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Batch:
        self._after = hand_logits
        if way == "pipe":
            if len(inputs) > 1:
                raise UnsupportedError(
                    "A pipeline makes its own batches, so that invokes cannot share one: pass a "
                    "list to `model.pipe(...)`, or run the inputs one after the other."
                )
            return super()._batch(way, inputs, settings)
        if way != "scan":
            self.dispatch()
        prepared = self._encoder.prepare(inputs, generate=way == "generate")
        self._after = partial(hand_logits, ends=prepared.ends)
        spans = [Rows(*span) for span in prepared.spans]
        return Batch((), prepared.arguments, spans, prepared.rows)

    @contextmanager
    def _around(
        self, way: str, settings: Mapping[str, Any], running: Running | None
    ) -> Iterator[Callable[..., Any]]:
        if way == "pipe":
            with self._tokens(running):  # of a pipeline that generates
                yield self.pipeline
        elif way == "generate":
            with self._generating(settings, running) as function:
                yield function
        else:
            with super()._around(way, settings, running) as function:
                yield function

    @contextmanager
    def _generating(
        self, settings: Mapping[str, Any], running: Running | None
    ) -> Iterator[Callable[..., Any]]:
        module: Any = self.module
        if not hasattr(module, "generate"):
            raise UnsupportedError(
                f"{type(module).__name__} cannot generate: it has no decoding loop. One forward is "
                "`model.trace(...)`."
            )
        if running is not None and adapters.wraps(module):
            raise UnsupportedError(
                f"{type(module).__name__} generates with the model inside it, whose forwards are "
                "none of its own: its steps cannot be told. Take that model, whose layers are "
                "adapted: `TransformersModel(peft_model.get_base_model())`."
            )
        wanted = generation(
            settings, generation_config=self.generation_config, tokenizer=self.tokenizer
        )
        with self._tokens(running), seeded(wanted.seed, module.device):
            yield partial(module.generate, **wanted.keywords)

    def _tokens(self, running: Running | None) -> AbstractContextManager[None]:
        """Let blocks meet the tokens that are drawn."""
        return nullcontext() if running is None else drawing(self.module, running)
