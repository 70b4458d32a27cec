"""`VLLM`: the model as users hold it, in the client."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from midstream.errors import CaptureError, PromptError, UnsupportedError
from midstream.interleaving.node import Node
from midstream.interleaving.source import Operation, Source
from midstream.modeling.vllm import arguments as args
from midstream.modeling.vllm import bootstrap, meta, prompts
from midstream.modeling.vllm import taps as declared
from midstream.modeling.vllm.asynchronous.engine import AsyncEngine
from midstream.modeling.vllm.asynchronous.model import Asynchronous
from midstream.modeling.vllm.building import refuse_reimport
from midstream.modeling.vllm.checking.model import Checking
from midstream.modeling.vllm.client import Engine
from midstream.modeling.vllm.data import read
from midstream.modeling.vllm.edits import Editable, EditRegistry
from midstream.modeling.vllm.generate import Generating
from midstream.modeling.vllm.limits import NAMES as LIMITS
from midstream.modeling.vllm.limits import Limits
from midstream.modeling.vllm.locations import EngineModel
from midstream.modeling.vllm.modes import on_loop, sync_only
from midstream.modeling.vllm.remote.aio import AsyncServer
from midstream.modeling.vllm.remote.model import NO_ENGINE, Elsewhere, refuse_local
from midstream.modeling.vllm.remote.waiting import refuse_blocking
from midstream.modeling.vllm.session import Session, Sessions
from midstream.modeling.vllm.stats import Stats
from midstream.modeling.vllm.stored import Stored, Storing, no_objects
from midstream.modeling.vllm.tokenizers import tokenizer_of
from midstream.modeling.vllm.tracer import Tracer
from midstream.modeling.vllm.wire import KEY, MODEL, NODE, STORED, TOKENIZER, TRACER
from midstream.tracing import Block

if TYPE_CHECKING:
    from midstream.modeling.transformers.model import TransformersModel

_OURS = ("batch_invariant", "dispatch", "mode", "rename", "taps", *LIMITS)
"""Arguments of a model that are no engine's."""


class VLLM(Elsewhere, Asynchronous, Generating, Editable, Storing, Sessions, Checking, EngineModel):
    """A language model served by vLLM, whose forward passes can be read and edited.

    Without ``dispatch`` only the module tree and the tokenizer are made: no weights, no GPU. The
    first trace builds the engine. As a context manager the model closes its engine at the end.

    Args:
        repo: checkpoint folder or repository id.
        mode: "sync", or "async" for an engine that serves one event loop: traces are awaited
            (``tracer.backend``), and calls that wait for the engine have awaitable forms.
        taps: the only locations that blocks may ask for, beside `logits`, `samples` and
            `tracer.result`: "model.layers.*.output", "model.layers.3.mlp.input",
            "model.layers.3.mlp.source.act_fn_0.output"; * is one part of a path. CUDA graphs
            with breaks there are captured when the engine is built, for all decode steps with a
            block. Without taps every location is served, and the engine learns which are used.
        dispatch: build the engine now.
        rename: further names for modules: path ("model.layers") or last part of one ("layers") to
            a name or a list of names.
        batch_invariant: ask vLLM for kernels whose results do not depend on what else is in the
            batch; on some GPUs only, and slower.
        block_timeout, max_save_bytes, max_snapshot_bytes, max_write_log_bytes: what a block may
            take, see ``limits.Limits``; a request that goes over one fails, others go on.
        serve, api_key: address of a midstream server that is to run everything, and a key for it.
            The tree is the server's; no engine is built here, and vLLM need not be installed.
        max_graphs, max_graph_bytes: CUDA graphs of decode steps with blocks that are kept, and
            bytes of GPU memory for them, see ``limits.Limits``.
        engine: vLLM's own engine arguments (`dtype`, `max_model_len`, `gpu_memory_utilization`...).

    Attributes:
        repo: as given.
        mode: as given.
        taps: the patterns as given; of an engine that is up, or a server, the full names of the
            locations: in the patterns' order, those of one pattern in the tree's. Empty where
            every location is served.

    Raises:
        EngineBuildError: no fitting vLLM is installed, a setting selects its older model runner,
            or the engine did not come up.
        UnsupportedError: an engine argument that blocks cannot work with.
        TypeError: an unknown engine argument.
        ValueError: an unknown mode, a `worker_cls` or `scheduler_cls` not derived from ours, a tap
            that names nothing (without ``dispatch`` too), or an argument that contradicts taps.
    """

    def __init__(
        self,
        repo: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        taps: Sequence[str] = (),
        dispatch: bool = False,
        rename: Mapping[str, str | list[str]] | None = None,
        batch_invariant: bool = False,
        serve: str | None = None,
        api_key: str | None = None,
        **engine: Any,
    ):
        self.repo = str(repo)
        args.check_mode(mode)
        self.mode = mode
        self._servers = {}
        self._engine = self._async_engine = None
        self._lock = threading.RLock()  # an engine runs one trace; other threads wait
        self._session: Session | None = None
        self._taps: tuple[str, ...] = ()
        self._patterns: tuple[str, ...] = ()
        self._edits, self._stored = EditRegistry(self), no_objects()
        self._tokenizer: Any = None
        if serve is not None:
            refuse_local(dispatch, rename, {**({"taps": taps} if taps else {}), **engine})
            super().__init__(self._tree_from(serve, api_key))
            return
        self._server(None, api_key)  # refuses a key without a server
        self._vllm = bootstrap.installed()
        bootstrap.refuse_old_runner()
        if batch_invariant:
            bootstrap.refuse_invariance(self._vllm)
        self._invariant = bool(batch_invariant)
        if dispatch:
            refuse_reimport()  # before what takes long
        args.refuse(engine)
        self._patterns = declared.check(taps, engine)
        bootstrap.prepare_process(self._vllm)
        limits = Limits.taken_from(engine)
        known, of_async = _engine_arguments(mode)
        args.check_known(engine, known | of_async, "an argument of vLLM's engine", _OURS)
        args.check_classes(engine, cpu=self._vllm.cpu)
        with bootstrap.environment(bootstrap.runner_variables(self._vllm)):
            of_model = {name: engine[name] for name in engine.keys() - of_async}
            root, self._model_config = meta.build(self.repo, of_model)
        super().__init__(root, rename)
        locations = declared.resolve(self._patterns, self.tree)
        self._taps = tuple(location.name for location in locations)
        self._settings = _with_ours(
            engine,
            {
                "rename": dict(rename or {}),
                "limits": limits.changed(),
                "taps": declared.as_data(locations),
            },
        )
        if dispatch:
            self.dispatch()

    # The engine.

    @property
    def dispatched(self) -> bool:
        """Whether the engine is up."""
        return self._engine is not None or self._async_engine is not None

    @property
    def taps(self) -> tuple[str, ...]:
        """The declared taps: as given, and resolved where an engine, or a server, serves them."""
        return self._taps if self.dispatched or self._is_elsewhere else self._patterns

    @property
    def vllm_entrypoint(self) -> Any:
        """The engine as vLLM's `LLM`, or `AsyncLLM`; None until the engine is up."""
        engine = self._engine or self._async_engine
        return engine.llm if engine is not None else None

    def dispatch(self) -> None:
        """Build the engine, if it is not up. An event loop that calls this waits.

        Raises:
            EngineBuildError: it did not come up; the text holds the root cause.
        """
        if self._is_elsewhere:
            raise UnsupportedError(NO_ENGINE)
        with self._lock:
            if self.mode == "async":
                self._dispatch_async()
            elif self._engine is None:
                self._engine = Engine(
                    self.repo, self._settings, self._vllm, invariant=self._invariant
                )

    def stats(self) -> Stats:
        """What the engine has done since it was built, and what it holds; cheap to ask.

        Without an engine all is zero. Waits for a trace that another thread runs.
        """
        sync_only(self.mode, "model.stats()", "await model.astats()")
        with self._lock:
            return self._engine.stats() if self._engine is not None else Stats()

    def close(self) -> None:
        """End the engine's processes and free its memory. The next trace builds a new engine.

        What was installed in the engine ends with it. On an event loop: ``await model.aclose()``.
        """
        if self.mode == "async" and on_loop():
            sync_only(self.mode, "model.close()", "await model.aclose()")
        with self._lock:
            for engine in self._let_go():
                engine.close()
        for server in self._let_go_of_servers():
            if not isinstance(server, AsyncServer):
                server.close()

    def _let_go(self) -> list[Engine | AsyncEngine]:
        """Forget the engine, which is given, and what was installed in it."""
        found = [engine for engine in (self._engine, self._async_engine) if engine is not None]
        self._engine = self._async_engine = None
        self._edits.forget()
        self._stored = no_objects()
        return found

    def __enter__(self) -> VLLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer as vLLM resolves it; None with `skip_tokenizer_init`."""
        if self._tokenizer is None and not self._is_elsewhere:
            self._tokenizer = tokenizer_of(self._model_config)
        return self._tokenizer

    def transformers(self, **loading: Any) -> TransformersModel:
        """The same checkpoint as a HuggingFace model in this process, for gradients.

        Values that a trace brought home can be written into its forwards. The engine is left as it
        is: ``close()`` it first where memory is short.

        Args:
            loading: arguments of ``TransformersModel``; the dtype is the engine's without one.

        Returns:
            The model, whose weights the first trace loads.
        """
        from midstream.modeling.transformers.model import TransformersModel

        config = self._model_config
        ours = {
            "dtype": config.dtype,
            "revision": config.revision,
            "tokenizer": self.tokenizer,
            "trust_remote_code": config.trust_remote_code or None,
        }
        given = {name: value for name, value in ours.items() if value is not None}
        return TransformersModel(self.repo, **{**given, **loading})

    # Traces.

    def trace(
        self,
        prompt: Any = None,
        *more: Any,
        block: Callable[..., Any] | None = None,
        run: bool = True,
        serve: str | None = None,
        api_key: str | None = None,
        blocking: bool = True,
        **settings: Any,
    ) -> Tracer:
        """Run one prompt with a block beside its forward passes, or several in invokes.

        Args:
            prompt: text, token ids, a tokenizer's output, chat messages, or vLLM's prompt mapping.
                Without one the body opens requests with ``tracer.invoke(prompt)``; they are
                submitted together when it ends.
            more: nothing; several prompts take an invoke each.
            block: a function ``block(model, tracer)`` to run in place of a `with` body.
            run: False captures only, for ``tracer.to_bytes()``; no engine is needed.
            serve, api_key: address of a midstream server that is to run it, and a key for it; this
                model's own engine by default. No engine is built here.
            blocking: False, with ``serve``, returns at once; see ``tracer.collect()``.
            settings: vLLM's sampling settings (`temperature`, `max_tokens` or `max_new_tokens`,
                `seed`, ...), `lora_request`, and `edits`: names of the installed edits to run
                beside those without a name; all run without it. With mode="async" also
                `stream_saves`: give what is appended to saved lists as it is made, see ``Backend``.

        Returns:
            The tracer: a context manager whose body is the block, or, with ``block``, done. With
            mode="async" the requests are on their way then, see ``tracer.backend``; ``async with``
            waits for them and binds the names.

        Raises:
            PromptError: not exactly one prompt, or one longer than a step.
            TypeError: an unknown setting, or a block that is no function.
            ValueError: no installed edit has one of the names.
            InterventionError: the block, or an edit, failed (at the end of the `with`).
            ServerError: the server cannot be reached, or refuses.
        """
        self._check_settings(settings, streams=self.mode == "async" or not run)
        server = self._server(serve, api_key)
        if not blocking:
            refuse_blocking(server, self.mode)
        if run and server is None:
            self._edits.chosen(settings.get("edits"))
        if prompt is None and block is not None:
            raise PromptError("trace(block=...) needs a prompt.")
        checked = None if prompt is None else self._prompt(prompt, more)
        tracer = Tracer(self, checked, settings, run=run)
        tracer._server, tracer._blocking = server, blocking
        if block is not None:
            tracer._take(Block(function=block))
        return tracer

    def _prompt(self, prompt: Any, more: tuple[Any, ...]) -> dict[str, Any]:
        if self._is_elsewhere and prompts.is_chat(prompt) and not more:
            return {"messages": list(prompt)}  # the server has the template
        return prompts.single(prompt, self.tokenizer, more)

    def run(self, data: bytes) -> Tracer:
        """Run a trace that another process captured (same midstream and Python version).

        Args:
            data: what ``tracer.to_bytes()`` gave. It holds code: run only what you trust.

        Returns:
            The tracer, done: values in ``saves``, the request in ``result``. With mode="async" it
            is on its way, see ``tracer.backend``.

        Raises:
            ValueError: ``data`` is no captured trace, or one of another version.
            InterventionError: the block failed.
        """
        tracer = Tracer(self, None, {})
        tracer._requests = read(data)
        tracer._execute({})
        return tracer

    def _reference(self, value: Any) -> str | None:
        """The name under which the engine has an object of this model; None for all others."""
        if value is self:
            return MODEL
        if isinstance(value, Node | Source | Operation):
            if value._tree is self._tree:
                return f"{NODE}:{value.path}"
            raise CaptureError(f"The block uses '{value.path}' of another model than it traces.")
        if isinstance(value, Tracer):
            return TRACER
        if isinstance(value, Stored):
            return f"{STORED}:{value._reference(self)}"
        if value is self._tokenizer and value is not None:
            return TOKENIZER
        return None

    def __reduce__(self) -> Any:
        raise TypeError("A VLLM cannot be pickled. Inside its own trace it can be used by name.")


def _with_ours(engine: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments that take what is ours to where blocks run."""
    given = {name: value for name, value in ours.items() if value}
    if not given:
        return dict(engine)
    return {
        **engine,
        "additional_config": {**(engine.get("additional_config") or {}), KEY: given},
    }


def _engine_arguments(mode: str) -> tuple[frozenset[str], frozenset[str]]:
    """VLLM's engine arguments, and those that only its asynchronous engine has."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    known = frozenset(field.name for field in dataclasses.fields(EngineArgs)) - {"model"}
    further = frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))
    return known, further - known - {"model"} if mode == "async" else frozenset()
