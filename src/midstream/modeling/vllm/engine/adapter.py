"""The one file that touches the internals of vLLM's model runner.

Each step: take in new requests and close finished ones, decide whether a block is active, and if so
run the forward eagerly with hand-overs around it, then the logits and the sampled tokens. A step
without an active block runs vLLM's code as it stands: no hook, no copy, no branch in the forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from midstream.errors import MidstreamError
from midstream.interleaving.breaks import DeclaredForward
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import LOGITS, SAMPLES
from midstream.interleaving.replays import Replay
from midstream.interleaving.routes import Guess
from midstream.interleaving.run import Run
from midstream.interleaving.tapped import Missed, Tapped
from midstream.modeling.vllm.engine.cuda_graphs import (
    CudaGraphs,
    captures_decodes,
    has_state,
)
from midstream.modeling.vllm.engine.declared import DeclaredGraphs, warn_without_graphs
from midstream.modeling.vllm.engine.graphs import Graph, TappedGraphs
from midstream.modeling.vllm.engine.host import BlockHost, Progress
from midstream.modeling.vllm.engine.indices import index_limit
from midstream.modeling.vllm.engine.kernels import EagerKernels
from midstream.modeling.vllm.engine.parallel.pipeline import Pipeline, pipeline_of, stages
from midstream.modeling.vllm.engine.parallel.tensor import TensorRanks
from midstream.modeling.vllm.engine.parallel.tensor_setup import join, patience, survey
from midstream.modeling.vllm.engine.statistics import Statistics
from midstream.modeling.vllm.engine.tokens import TokenCheck
from midstream.modeling.vllm.limits import Limits
from midstream.modeling.vllm.payloads import Mirrors, pack
from midstream.modeling.vllm.payloads import Record as BlockRecord
from midstream.modeling.vllm.tokenizers import tokenizer_of
from midstream.modeling.vllm.wire import KEY

_SHARE = 0.8  # of the time vLLM gives a step, for blocks


class BlockRunner:
    """Mixed in before vLLM's model runner, on a GPU and on a CPU alike."""

    # what the runner class behind this one has
    model: Any
    model_config: Any
    vllm_config: Any
    sampler: Any
    cudagraph_manager: Any
    req_states: Any
    model_state: Any
    kv_cache_config: Any
    device: torch.device

    blocks: BlockHost
    ranks: TensorRanks | None
    pipeline: Pipeline | None
    statistics: Statistics
    client: str

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and make its tree."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        given = self.vllm_config.additional_config
        ours = given.get(KEY, {}) if isinstance(given, dict) else {}
        self.pipeline = pipeline_of(self.vllm_config, self.device)
        self._vocabulary = int(self.model_config.get_vocab_size())
        self.blocks = BlockHost(
            self.model,
            lambda: tokenizer_of(self.model_config),
            ours.get("rename"),
            limit=index_limit(self._vocabulary, int(self.model_config.max_model_len)),
            stateful=self._stateful_layers(),
            limits=Limits(**ours.get("limits", {})),
            step_timeout=_SHARE * envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS / stages(self.pipeline),
            taps=ours.get("taps", ()),
            patience=patience(),
            pipeline=self.pipeline,
        )
        self.ranks = join(self.blocks.interleaver, self.vllm_config)
        if self.vllm_config.parallel_config.world_size == 1:  # of several, one rank sends
            self.blocks.mirror_to(Mirrors(self.client))
        self.statistics = Statistics()
        self._kernels = EagerKernels(self.model, self.vllm_config)
        self.blocks.interleaver.around_calls = self._kernels
        self._active: dict[str, list[Run]] = {}
        self._replays: dict[str, list[Replay]] = {}
        self._eager = False
        self.graphs: TappedGraphs | DeclaredGraphs | None = None
        self._guess: Guess | None = None
        self._graph: Graph | None = None
        self._prepared: dict[str, Any] = {}
        for name in ("prepare_attn", "prepare_inputs"):
            made = getattr(self.model_state, name)
            setattr(self.model_state, name, self._kept(name, made))
        self._runs_ahead = bool(self.vllm_config.scheduler_config.async_scheduling)
        self._rows: dict[Run, Rows] = {}
        self._sizes: tuple[int, ...] = ()
        self._closed: list[BlockRecord] = []

    def _stateful_layers(self) -> Iterable[Any]:
        """The layers that have to run: with a cache, a state, or a part in a collective.

        vLLM's kernels find the first two by name. Of several ranks, any layer may wait for others.
        """
        if self.vllm_config.parallel_config.world_size > 1:
            return self.model.modules()  # type: ignore[no-any-return]
        return self.vllm_config.compilation_config.static_forward_context.values()  # type: ignore[no-any-return]

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Set up the cache and the graph manager, whose dispatch then knows of active blocks."""
        if self.ranks is not None:
            survey(self.ranks, self)
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        manager = self.cudagraph_manager
        if manager is None:
            return
        manager.dispatch = self._dispatch(manager, manager.dispatch)
        manager.run_fullgraph = self._full_graph(manager.run_fullgraph)
        if self._captures_blocks():
            self.keep_graphs(CudaGraphs(self, self._kernels))

    def _captures_blocks(self) -> bool:
        """Whether steps with blocks become graphs."""
        if self.blocks.interleaver.declared is None:
            return bool(self.graph_bytes) and not has_state(self.kv_cache_config)
        captures = captures_decodes(self.vllm_config)  # a state too: no step runs twice
        if not captures and self.device.type != "cpu":
            warn_without_graphs()
        return captures

    def capture_model(self, *args: Any, profile_only: bool = False, **kwargs: Any) -> int:
        """Capture vLLM's own graphs, then those of declared taps.

        Args:
            profile_only: find out how much memory they will take.

        Returns:
            Bytes of GPU memory that all of them take.
        """
        taken: int = super().capture_model(  # type: ignore[misc]
            *args, profile_only=profile_only, **kwargs
        )
        if isinstance(self.graphs, DeclaredGraphs):
            taken += self.graphs.estimate() if profile_only else self.graphs.capture_all()
        return taken

    @property
    def graph_bytes(self) -> int:
        """Memory to leave for graphs captured between steps; 0 if there are none."""
        if self.blocks.interleaver.declared is not None:
            return 0  # they are captured with vLLM's own, and counted with these
        limits = self.blocks.limits
        if self.vllm_config.parallel_config.world_size > 1:
            return 0
        wanted = limits.max_graphs and captures_decodes(self.vllm_config)
        return int(limits.max_graph_bytes) if wanted else 0

    def keep_graphs(self, record: Any) -> None:
        """Have steps whose locations are known recorded, and run again.

        Args:
            record: a ``Record``; with declared taps a ``RecordAll``.
        """
        limits, interleaver = self.blocks.limits, self.blocks.interleaver
        if interleaver.declared is not None:
            make, needs = partial(DeclaredForward, interleaver), interleaver.declared.guess.needs
            self.graphs = DeclaredGraphs(make, record, needs)
            return
        self.graphs = TappedGraphs(
            partial(Tapped, interleaver), record, limits.max_graphs, limits.max_graph_bytes
        )

    def _kept(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """What vLLM prepares for a forward that may have to run a second time."""

        def kept(*args: Any, **kwargs: Any) -> Any:
            value = make(*args, **kwargs)
            if self._graph is not None:
                self._prepared[name] = value
            return value

        return kept

    def _dispatch(self, manager: Any, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        def for_blocks(
            num_reqs: int, num_tokens: int, *args: Any, num_active_loras: int = 0, **kwargs: Any
        ) -> Any:
            shape = dispatch(
                num_reqs, num_tokens, *args, num_active_loras=num_active_loras, **kwargs
            )
            if not self._eager or self._find_graph(shape):
                return shape
            return BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                num_active_loras=manager._resolve_effective_loras(num_active_loras),
            )

        return for_blocks

    def _find_graph(self, shape: Hashable) -> bool:
        if self.graphs is not None and self._guess is not None:
            self._graph = self.graphs.find(shape, self._guess)
        return self._graph is not None

    def _full_graph(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def full_graph(shape: Any) -> Any:
            if self._graph is None:
                return run(shape)
            batch, kept = self._prepared["batch"], self._prepared
            inputs = {
                "input_ids": batch.input_ids,
                "positions": batch.positions,
                "inputs_embeds": None,
                "intermediate_tensors": None,
                **kept["prepare_inputs"],
            }
            with set_forward_context(
                kept["prepare_attn"],
                self.vllm_config,
                num_tokens=shape.num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                slot_mapping=build_slot_mappings_by_layer(kept["slots"], self.kv_cache_config),
                skip_compiled=True,
                is_padding=batch.is_padding,
            ):
                return self._replay(self.model.forward, inputs)

        return full_graph

    def _replay(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The forward as its graph; run again by hand if that cannot serve a block."""
        assert self._graph is not None
        assert self.graphs is not None
        interleaver, (tapped, recorded) = self.blocks.interleaver, self._graph
        try:
            with interleaver.tapping.phase(tapped, self._rows, self._sizes, inputs.values()):
                value = recorded.replay(forward, inputs)
                tapped.finish()
            self.graphs.counts.replays += 1
            return value
        except Missed:
            self.graphs.counts.wrong_guesses += 1
            interleaver.tapping.run_again(tapped.needs)
        return self._with_blocks(forward)(**inputs)

    # One step, in the order vLLM calls these.

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step's forward."""
        self._active, self._replays, self._eager = {}, {}, False
        self._guess = self._graph = None
        self._prepared.clear()
        self.blocks.clock.begin_step()
        try:
            output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
            if self.pipeline is not None and self._active and not self.pipeline.is_last:
                self.pipeline.hand_on(self._active, self.blocks.interleaver)
        except BaseException:
            self.blocks.interleaver.finish_step(learned=False)
            if self.graphs is not None:
                self.graphs.forget_wish()
            raise
        finally:
            self.model.__dict__.pop("forward", None)
        if (
            isinstance(output, ModelRunnerOutput) and self.blocks.reports
        ):  # a step with nothing to run
            output = copy.copy(output)  # the empty one is a shared constant
            self._attach(output)
        return output

    def finish_requests(self, scheduler_output: Any) -> None:
        """Drop finished requests; their blocks close, those of preempted ones stay."""
        super().finish_requests(scheduler_output)  # type: ignore[misc]
        self._closed += self.blocks.close(scheduler_output.finished_req_ids)

    def add_requests(self, scheduler_output: Any) -> None:
        """Take in new requests with their blocks."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None:
                self.blocks.admit(new.req_id, new.sampling_params)

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Gather the batch; from here on it is known which blocks are active in the step."""
        gathered = super().gather_batch_req_state(  # type: ignore[misc]
            scheduler_output, dummy_run
        )
        if not dummy_run:
            if self.pipeline is not None:
                self.pipeline.catch_up(gathered[0].req_ids, self.blocks)
            self._active, self._replays = self.blocks.enter_step(_progress(gathered[0]))
            if self._active and self._runs_ahead:
                self._leave_ended_requests(gathered[0])
        if self._active or self._replays:
            self._begin_step(gathered[0])
        return gathered

    def _leave_ended_requests(self, batch: Any) -> None:
        """Take requests that the token before has ended out of the active ones.

        Asynchronous scheduling plans a step before it has seen the last one's token, so a request
        may be in the step that should not be. Only blocks that go on pay for the look.
        """
        rows = dict(zip(batch.req_ids, batch.idx_mapping_np, strict=True))
        asked = [
            i for i, runs in self._active.items() if runs[0].visit and self.blocks.ending_ids(i)
        ]
        if not asked:
            return
        places = torch.as_tensor([int(rows[i]) for i in asked], device=self.device)
        tokens = self.req_states.last_sampled_tokens[places, 0].tolist()
        for request_id, token in zip(asked, tokens, strict=True):
            if token in self.blocks.ending_ids(request_id):
                del self._active[request_id]

    def _begin_step(self, batch: Any) -> None:
        """Let the active blocks execute up to their first access.

        Only if one of them waits for a module does the forward have to run eagerly: a block that
        has ended, or waits for logits or samples, leaves it as it is.
        """
        self._refuse_parts(batch)
        interleaver = self.blocks.interleaver
        runs = [run for runs in self._active.values() for run in runs]
        with self.pipeline.begun(self._active) if self.pipeline and runs else nullcontext():
            interleaver.begin_step(
                runs, [replay for found in self._replays.values() for replay in found]
            )
        self._eager = interleaver.wants_modules
        if self._eager and self.graphs is not None and all(run.visit for run in runs):
            self._guess = interleaver.tapping.guess(runs)

    def _refuse_parts(self, batch: Any) -> None:
        """Let blocks fail whose prompt was not run in one step."""
        beginning = {i for i, runs in self._active.items() if not runs[0].visit}
        for request_id, seen in zip(
            batch.req_ids if beginning else (), batch.num_computed_prefill_tokens_np, strict=False
        ):
            if seen and request_id in beginning:
                for run in self._active[request_id]:
                    run.fail(_split(int(seen)))

    def prepare_inputs(self, scheduled: Any, states: Any, shape: Any, *args: Any) -> Any:
        """Prepare the batch; from here on each request's rows are known."""
        batch = super().prepare_inputs(scheduled, states, shape, *args)  # type: ignore[misc]
        if self._active or self._replays:
            self._find_rows(batch)
        if self._eager and shape.cg_mode != CUDAGraphMode.FULL:
            self._replace_forward(self.model.forward)
        self._prepared["batch"] = batch
        wanted = self.blocks.interleaver.wanted_modules if self._eager else ()
        self.statistics.count(wanted, tapped=self._graph is not None)
        return batch

    def _replace_forward(self, forward: Callable[..., Any]) -> None:
        if self._graph is None:
            self.model.forward = self._with_blocks(forward)
        else:
            self.model.forward = lambda **inputs: self._replay(forward, inputs)

    def prepare_attn(self, input_batch: Any) -> Any:
        """Prepare what attention needs."""
        tables, self._prepared["slots"] = super().prepare_attn(input_batch)  # type: ignore[misc]
        return tables, self._prepared["slots"]

    def _find_rows(self, batch: Any) -> None:
        """Row spans in batch order, which differs from the scheduler's."""
        starts = batch.query_start_loc_np.tolist()
        self._rows = {}
        for request_id, (start, stop) in zip(batch.req_ids, pairwise(starts), strict=False):
            for replay in self._replays.get(request_id, ()):
                replay.start = start
            runs = self._active.get(request_id, ())
            for run in runs:
                # after a preemption earlier tokens are run again, for nobody to see
                self._rows[run] = Rows(stop - 1 if run.visit else start, stop)
        self._sizes = (batch.num_tokens, batch.num_tokens_after_padding)

    def _with_blocks(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward with blocks beside it, outside its compiled graph."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            get_forward_context().skip_compiled = True  # read when a compiled module is called
            interleaver = self.blocks.interleaver
            with interleaver.phase(self._rows, self._sizes, logged=True), self._kernels():
                args, kwargs = interleaver.enter("", (args, kwargs))
                value = interleaver.leave("", interleaver.call("", forward, args, kwargs))
            if not self._active:  # nothing more comes in a step that only runs rows anew
                interleaver.finish_step(learned=False)
            return value

        traced.__dict__["__wrapped__"] = forward  # for who looks for the forward's source
        return traced

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Compute logits and draw tokens, handing both to the active blocks."""
        if not self._active:
            with self._valid_tokens(input_batch.req_ids):
                return super().sample(  # type: ignore[misc]
                    hidden_states, input_batch, grammar_output
                )
        learned = False
        try:
            with self._head(input_batch.req_ids, grammar_output):
                output = super().sample(  # type: ignore[misc]
                    hidden_states, input_batch, grammar_output
                )
            learned = True
            return output
        finally:
            self.blocks.interleaver.finish_step(learned=learned)

    @contextmanager
    def _head(self, request_ids: list[str], grammar: Any) -> Iterator[None]:
        """The model's head and the sampler, on the instances, with hand-overs behind them."""
        rows = {
            run: Rows(index, index + 1)
            for index, request_id in enumerate(request_ids)
            for run in self._active.get(request_id, ())
        }
        sizes = (len(request_ids),)
        self.model.compute_logits = self._logits(self.model.compute_logits, rows, sizes)
        check = TokenCheck(self._vocabulary, request_ids, grammar)
        self.sampler.sample = self._samples(self.sampler.sample, rows, check)
        try:
            yield
        finally:
            del self.model.compute_logits
            del self.sampler.sample

    @contextmanager
    def _valid_tokens(self, request_ids: list[str]) -> Iterator[None]:
        """As behind blocks: what one that has ended left in the cache may make logits NaN."""
        if not self.blocks.have_any_of(request_ids):
            yield
            return
        draw = self.sampler.sample

        def valid(*args: Any, **kwargs: Any) -> Any:
            sampled, processed = draw(*args, **kwargs)
            return self._in_vocabulary(sampled), processed

        self.sampler.sample = valid
        try:
            yield
        finally:
            del self.sampler.sample

    def _in_vocabulary(self, sampled: torch.Tensor) -> torch.Tensor:
        """The drawn ids, [requests]; the first token's for one that there is not.

        Where a block has made logits NaN, a GPU's kernel may give a place behind the vocabulary,
        and looking that up in the next step would end the engine.
        """
        return sampled.masked_fill_(sampled >= self._vocabulary, 0)

    def _logits(
        self, compute: Callable[..., Any], rows: Mapping[Run, Rows], sizes: tuple[int, ...]
    ) -> Callable[..., Any]:
        interleaver = self.blocks.interleaver

        def logits(*args: Any, **kwargs: Any) -> Any:
            by_hand = self._eager and self._graph is None
            with interleaver.phase(rows, sizes), self._kernels() if by_hand else nullcontext():
                value = compute(*args, **kwargs)
            return interleaver.hand_over(LOGITS, value, rows, sizes)

        return logits

    def _samples(
        self, sample: Callable[..., Any], rows: Mapping[Run, Rows], check: TokenCheck
    ) -> Callable[..., Any]:
        def samples(*args: Any, **kwargs: Any) -> Any:
            sampled, processed = sample(*args, **kwargs)
            ids = self._in_vocabulary(sampled).view(-1, 1)
            given = self.blocks.interleaver.hand_over(SAMPLES, ids, rows, (len(ids),), check=check)
            return given.view(-1), processed

        return samples

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the step's tokens; records of blocks that are done or closed leave with them."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if output is not None and self.blocks.reports:
            if self._active:
                self._closed += self.blocks.finished(self._active)
                if self.pipeline is not None:
                    self.pipeline.hand_back(self._active)
            self._attach(getattr(output, "model_runner_output", output))
            if self.graphs is not None:
                self.graphs.capture()
        return output

    def _attach(self, output: Any) -> None:
        closed, self._closed = self._closed, []
        if self.ranks is not None and self.ranks.group.rank:
            closed = []  # the first rank's go home
        mirrors = self.blocks.mirrors
        records = pack(closed, owner=self.client, mirrors=mirrors) if closed else b""
        ended, waiting = self.blocks.ended(), self.blocks.waiting()
        if records or ended or waiting:
            setattr(output, KEY, (records, ended, waiting))


def _progress(batch: Any) -> Iterator[Progress]:
    """How far each request is. What was drawn before a preemption counts as prompt after it."""
    befores = batch.num_computed_prefill_tokens_np
    stops = befores + batch.num_scheduled_tokens
    each = (batch.req_ids, befores.tolist(), stops.tolist(), batch.prefill_len_np.tolist())
    yield from map(Progress, *each)


def _split(seen: int) -> MidstreamError:
    return MidstreamError(
        f"The prompt was not run in one step: {seen} of its tokens had been run before. A block "
        "has to see its prompt whole; raise `max_num_batched_tokens`."
    )
