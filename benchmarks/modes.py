"""The processes of the GPU benchmark: plain vLLM, and midstream's engine row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import traced
from benchmarks.arrivals import Flow, Schedule, run_plain
from benchmarks.catalogue import ROWS
from benchmarks.measuring import Cell, Recorder, first_line
from benchmarks.shapes import Scale, engine


def plain(recorder: Recorder, rows: Sequence[str], scale: Scale, *, is_tiny: bool) -> None:
    """Plain vLLM: whatever the rows are compared with."""
    from vllm import LLM

    folder, settings = engine(is_tiny=is_tiny)
    built: list[Any] = []

    def build() -> None:
        built.append(LLM(model=folder, **settings))

    needed = {ROWS[row].base for row in rows}
    build()
    for base, measure in _PLAIN.items():
        if base in needed:
            measure(built[0], recorder, scale)
    if "build" in needed:
        built.pop().llm_engine.engine_core.shutdown()
        rebuild(recorder, build)
    if built:
        built.pop().llm_engine.engine_core.shutdown()


def midstream(recorder: Recorder, rows: Sequence[str], scale: Scale, *, is_tiny: bool) -> None:
    """Midstream's engine with its defaults: every row."""
    from midstream import VLLM

    folder, settings = engine(is_tiny=is_tiny)
    with VLLM(folder, dispatch=True, **settings) as model:
        recorder.counts = lambda: traced.counts(model)
        run = traced.Traced(model, recorder, scale)
        for row in rows:
            if row != "build" and not recorder.is_late:
                _guarded(recorder, row, model, getattr(run, row.replace("-", "_")))
        recorder.counts = dict
        if "build" in rows:
            model.close()
            rebuild(recorder, model.dispatch)


def _guarded(recorder: Recorder, row: str, model: Any, measure: Callable[[], None]) -> None:
    """Measure a row; what it raises outside its timed parts is its error too."""
    try:
        revive(model)
        measure()
    except Exception as error:  # noqa: BLE001  # a row that fails must not end the others
        recorder.add(Cell(row, 0, error=first_line(error)))


def revive(model: Any) -> None:
    """Build the engine again if a row has ended it, so that no time of the next is the build."""
    from midstream.errors import EngineDeadError

    try:
        model.stats()
    except EngineDeadError:
        model.close()
    model.dispatch()


def rebuild(recorder: Recorder, build: Callable[[], Any]) -> None:
    """Time of a second build: modules are imported, and what is compiled once is compiled."""
    recorder.measure("build", 1, build, base="build", repeats=1, warms_up=False)


def _decode(llm: Any, recorder: Recorder, scale: Scale) -> None:
    for count in scale.batches:
        work = _generate(llm, scale.prompts(count), scale.greedy())
        recorder.measure("decode", count, work, steps=scale.tokens)


def _medium(llm: Any, recorder: Recorder, scale: Scale) -> None:
    work = _generate(llm, scale.prompts(1, scale.medium), scale.greedy(1))
    recorder.measure("medium", 1, work, repeats=scale.medium_repeats)


def _long(llm: Any, recorder: Recorder, scale: Scale) -> None:
    for count in scale.long_batches:
        work = _generate(llm, scale.prompts(count, scale.long), scale.greedy(1))
        recorder.measure("long", count, work)


def _many(llm: Any, recorder: Recorder, scale: Scale) -> None:
    work = _generate(llm, scale.prompts(scale.many), scale.greedy(1))
    recorder.measure("many", scale.many, work)


def _half(llm: Any, recorder: Recorder, scale: Scale) -> None:
    count = scale.batches[-1]
    schedule = Schedule.together(count, scale.tokens)

    def work() -> dict[str, Any]:
        return traced.plain_time(run_plain(llm, schedule, scale), schedule)

    recorder.measure("half", count, work, steps=scale.tokens)


def _arrivals(llm: Any, recorder: Recorder, scale: Scale) -> None:
    schedule = Schedule.poisson(scale)

    def work() -> dict[str, Any]:
        flow: Flow = run_plain(llm, schedule, scale)
        return traced.step_time(flow)

    recorder.measure("arrivals", scale.in_flight, work)


def _generate(
    llm: Any, prompts: Sequence[list[int]], settings: dict[str, Any]
) -> Callable[[], None]:
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = SamplingParams(**settings)

    def work() -> None:
        llm.generate(given, params, use_tqdm=False)

    return work


_PLAIN: dict[str, Callable[[Any, Recorder, Scale], None]] = {
    "decode": _decode,
    "half": _half,
    "medium": _medium,
    "long": _long,
    "many": _many,
    "arrivals": _arrivals,
}
"""What plain vLLM does for rows that are compared with it, in the order of their importance."""
