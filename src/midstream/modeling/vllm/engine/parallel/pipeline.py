"""One stage of a pipeline: when it hears from the others, and what it tells them.

A step runs the whole block on every stage. What the block met on a stage goes on to the next one
with the step's forward, and comes back from the last one when the step's tokens have been drawn;
the earlier stages take that in before the request's next step. Both happen only in steps in which
a block has something to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from midstream.errors import MidstreamError
from midstream.modeling.vllm.engine.parallel.pipeline_attributes import Attributes
from midstream.modeling.vllm.engine.parallel.pipeline_cache import give, guard, take
from midstream.modeling.vllm.engine.parallel.pipeline_interleaver import StagedInterleaver
from midstream.modeling.vllm.engine.parallel.pipeline_journal import Entry, Failed
from midstream.modeling.vllm.engine.parallel.pipeline_link import Link, encode
from midstream.modeling.vllm.engine.parallel.pipeline_run import StagedRun, State
from midstream.modeling.vllm.engine.parallel.stages import Stages, outline_of

if TYPE_CHECKING:
    from midstream.interleaving.indices import Limit
    from midstream.interleaving.interleaver import Interleaver
    from midstream.interleaving.node import Tree
    from midstream.interleaving.run import Run
    from midstream.modeling.vllm.engine.host import BlockHost
    from midstream.modeling.vllm.engine.inside import BlockModel, Rename

Active = Mapping[str, Sequence[Any]]
"""By request, its runs in their turn."""


class Onward(NamedTuple):
    """What one block met in a step so far, for the next stage.

    Attributes:
        marks: how much of it there was when each stage had ended.
        recorded: by cache, what the stages so far have recorded.
        full: whether a log of what it wrote is full.
    """

    request_id: str
    turn: int
    entries: list[Entry]
    marks: list[int]
    state: State
    recorded: list[list[Any]]
    full: bool


class Back(NamedTuple):
    """What one block met in a step on the later stages, for an earlier one.

    Attributes:
        agreed: see ``StagedRun.agreed``.
    """

    request_id: str
    turn: int
    entries: list[Entry]
    state: State
    agreed: tuple[bool, int | None]
    full: bool


class Pipeline:
    """What a stage has to do with the others.

    Args:
        group: vLLM's group of the stages.
        device: where blocks are given what other stages read.
        timeout: seconds that a stage waits for another; then the engine has failed.

    Attributes:
        sent: how many messages this stage has sent.
    """

    def __init__(self, group: Any, device: torch.device, timeout: float):
        self._group, self.device = group, device
        self._link = Link(group.ranks, timeout)
        self.mine, self.count = int(group.rank_in_group), int(group.world_size)
        self.is_last = self.mine == self.count - 1
        self.sent = 0
        self._owed = 0  # messages of the last stage that have not been taken in
        self._received: dict[Any, Onward] = {}

    @contextmanager
    def begun(self, active: Active) -> Iterator[None]:
        """A step begins: blocks first meet what they met on the stages before."""
        self._take_in(active)
        yield
        self._blocks_have_begun(active)

    def learn(self, tree: Tree) -> Stages:
        """Find out which stage has what, and complete the tree; all stages do so at once."""
        outlines: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(outlines, outline_of(tree), group=self._group.cpu_group)
        self.stages = Stages(outlines, self.mine)
        self.stages.complete(tree)
        return self.stages

    def _take_in(self, active: Active) -> None:
        self._received.clear()
        if self.mine == 0:
            return
        for found in self._link.receive(self.mine - 1):
            for run in active.get(found.request_id, ()):
                if run.turn == found.turn:
                    self._received[run] = found
                    self.stages.scripts[run] = found.entries, found.state
        for run in _runs(active):
            if run not in self._received:
                run.fail(_lost(run))

    def _blocks_have_begun(self, active: Active) -> None:
        """What earlier stages recorded is put into the caches, which are open now."""
        for run in _runs(active):
            guard(run.recorders)
            found = self._received.get(run)
            if found is None:
                continue
            if run.log is not None:
                run.log.full = run.log.full or found.full
            if self.is_last:
                give(run, found.recorded)

    def hand_on(self, active: Active, interleaver: Interleaver) -> None:
        """The forward of this stage, which is not the last, has ended."""
        interleaver.finish_step()
        self._link.send(
            self.mine + 1, _encoded([self._onward(run, i) for i, run in _named(active)])
        )
        self._owed += 1
        self.sent += 1
        for run in _runs(active):
            run.behind = True

    def _onward(self, run: StagedRun, request_id: str) -> Onward:
        before = self._received.get(run)
        marks = [*(before.marks if before else ()), len(run.journal)]
        recorded = [*(before.recorded if before else ()), take(run.recorders)]
        full = run.log is not None and run.log.full
        entries = list(run.journal)
        return Onward(request_id, run.turn, entries, marks, run.state, recorded, full)

    def hand_back(self, active: Active) -> None:
        """The step has ended on the last stage."""
        for run in _runs(active):
            run.agreed = run.agreement
        self.sent += self.mine
        for stage in range(self.mine):
            self._link.send(
                stage, _encoded([self._back(run, i, stage) for i, run in _named(active)])
            )

    def _back(self, run: StagedRun, request_id: str, stage: int) -> Back:
        found = self._received.get(run)
        mark = found.marks[stage] if found else 0
        entries = [] if run.done else run.journal[mark:]
        full = run.log is not None and run.log.full
        assert run.agreed is not None
        return Back(request_id, run.turn, entries, run.state, run.agreed, full)

    def catch_up(self, request_ids: Iterable[str], blocks: BlockHost) -> None:
        """Requests are in the step that begins: take in what they met on later stages before."""
        if self.is_last or not self._owed:
            return
        runs: list[Any] = [run for found in blocks.runs(request_ids).values() for run in found]
        while self._owed and (any(run.behind for run in runs) or self._owed > self._most_owed):
            self._owed -= 1
            for found in self._link.receive(self.stages.last):
                self._take_back(found, blocks)

    @property
    def _most_owed(self) -> int:
        """So many steps may be under way."""
        return 2 * self.count

    def _take_back(self, found: Back, blocks: BlockHost) -> None:
        runs = blocks.runs([found.request_id]).get(found.request_id)
        if runs is None:
            return  # the request has ended meanwhile
        run: Any = runs[found.turn]
        run.behind, run.agreed = False, found.agreed
        if run.log is not None:
            run.log.full = run.log.full or found.full
        if found.state.done:
            run.end_as(found.state)
        else:
            interleaver: Any = blocks.interleaver
            interleaver.catch_up(run, found.entries, found.state)


def _runs(active: Active) -> list[StagedRun]:
    return [run for runs in active.values() for run in runs]


def _named(active: Active) -> list[tuple[str, StagedRun]]:
    return [(request_id, run) for request_id, runs in active.items() for run in runs]


def _encoded(found: list[Any]) -> torch.Tensor:
    """A message; what cannot travel fails its block, not the engine."""
    try:
        return encode(found)
    except Exception:  # noqa: BLE001  # a value's own code may raise anything
        return encode([_portable(each) for each in found])


def _portable(found: Any) -> Any:
    try:
        encode(found)
    except Exception as error:  # noqa: BLE001  # a value's own code may raise anything
        text = f"{type(error).__name__}: {error}"
        failed = Failed(MidstreamError(f"A value cannot travel to another pipeline stage: {text}"))
        return found._replace(entries=[failed])
    return found


def _lost(run: Run) -> MidstreamError:
    return MidstreamError(
        "The pipeline stage before this one has sent nothing for this block, though it has "
        f"something to do in step {run.visit} of its request."
    )


def pipeline_of(config: Any, device: torch.device) -> Pipeline | None:
    """The stage of this worker; None if the model is on one."""
    if config.parallel_config.pipeline_parallel_size == 1:
        return None
    from vllm import envs
    from vllm.distributed.parallel_state import get_pp_group

    return Pipeline(get_pp_group(), device, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)


def stages(pipeline: Pipeline | None) -> int:
    """How many stages there are."""
    return 1 if pipeline is None else pipeline.count


def staged(
    pipeline: Pipeline,
    model: BlockModel,
    rename: Rename | None,
    limit: Limit | None,
    always: Collection[str],
) -> tuple[StagedInterleaver, type[StagedRun]]:
    """What runs blocks beside one stage, once its tree has the modules of all."""
    tree = model.tree
    found = pipeline.learn(tree)
    for path, names in (rename or {}).items():
        tree._alias(path, [names] if isinstance(names, str) else list(names))
    model.refuse_calls()
    made = StagedInterleaver(tree.modules, limit, always, found, pipeline.device)
    tree.shown = Attributes(made)
    return made, StagedRun
