"""Engines with declared taps: those locations, in prompts, eager steps and recorded ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import EngineBuildError, InterventionError, OutOfOrderError
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Tree
from midstream.interleaving.routes import Needs
from midstream.modeling.vllm.engine.declared import DeclaredGraphs, declared
from midstream.modeling.vllm.engine.graphs import Recorded
from tests.conftest import TINY, record_steps
from tests.interleaving.toy import Toy
from tests.modeling.vllm.conftest import line_of, runner_of
from tests.support.checkpoints import A, B, checkpoint
from tests.support.groups import give_experts_a_group

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
ACTIVATION = "model.layers.1.mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output"
TAPS = (
    *("model.layers.*.output", "model.layers.1.mlp.input", "model.layers.2.mlp.output"),
    *("model.layers.0.self_attn.source.self_attn_0.output", ACTIVATION),
)


@pytest.fixture(scope="module")
def tapped() -> Iterator[Any]:
    """An engine with declared taps, which records its decode steps as on a GPU."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    with VLLM(path, taps=TAPS, dispatch=True, **TINY) as model:
        record_steps(model)
        yield model


def test_taps_of_an_engine(tapped: Any) -> None:
    """They are the full names of all locations, fixed when it was built (A5, A41, A42, O1)."""
    assert tapped.taps == (
        *(f"model.model.layers.{i}.output" for i in range(4)),
        *("model.model.layers.1.mlp.input", "model.model.layers.2.mlp.output"),
        "model.model.layers.0.self_attn.source.self_attn_0.output",
        f"model.{ACTIVATION}",
    )


def everything(model: Any, tracer: Any) -> list[Any]:
    """Read all taps, the logits and the token in every step."""
    rows = []
    for _ in tracer.all():
        layers = model.model.layers
        found = [layers[0].self_attn.source.self_attn_0.output, layers[0].output]
        found.append(layers[1].mlp.input)
        found.append(layers[1].mlp.source.maybe_fused_act_quant_0.source.act_fn_0.output)
        found += [layers[1].output, layers[2].mlp.output, layers[2].output, layers[3].output]
        rows.append([*found, model.logits, model.samples])
    return rows


def editing(model: Any, tracer: Any) -> list[Any]:
    """Edit in place and replace, inputs, outputs and operations; read what comes of it."""
    rows = []
    for step in tracer.all():
        layers = model.model.layers
        attention = layers[0].self_attn.source.self_attn_0
        attention.output = attention.output * 1.5
        layers[0].output[0][:] += step
        layers[1].mlp.input = layers[1].mlp.input * 2
        inner = layers[1].mlp.source.maybe_fused_act_quant_0.source.act_fn_0
        inner.output = inner.output.clamp(min=-1)
        layers[2].mlp.output = -layers[2].mlp.output
        hidden, residual = layers[2].output
        layers[2].output = (hidden * 2, residual - 1)
        rows.append([*layers[3].output, model.logits])
    return rows


def flat(rows: list[Any]) -> list[torch.Tensor]:
    """All tensors of nested rows."""
    if isinstance(rows, torch.Tensor):
        return [rows]
    return [tensor for row in rows for tensor in flat(row)]


@pytest.mark.parametrize("block", [everything, editing])
def test_values_are_those_of_an_engine_without_taps(llama: Any, tapped: Any, block: Any) -> None:
    """Reads, edits and tokens are equal, bit for bit; all steps behind the prompt are recorded.

    Nothing is captured later, and no guess can be wrong (D1, D4, D5, D6, D8, D14, D16).
    """
    right = llama.trace(A, block=block, **GREEDY)
    before = tapped.stats()
    for _ in range(2):
        mine = tapped.trace(A, block=block, **GREEDY)
        assert mine.result.outputs[0].token_ids == right.result.outputs[0].token_ids
        found, its = flat(mine.saves["return"]), flat(right.saves["return"])
        assert len(found) == len(its) >= 18
        assert all(torch.equal(a, b) for a, b in zip(found, its, strict=True))
    after = tapped.stats()
    assert after.steps["tapped"] - before.steps["tapped"] == 2 * 5
    assert after.steps["eager"] - before.steps["eager"] == 2
    assert after.graphs["captures"] == after.graphs["held"] == 8
    assert after.graphs["wrong_guesses"] == 0


def test_the_first_step_of_a_block_may_be_any(tapped: Any, llama: Any) -> None:
    """A block that begins behind the prompt is served by a recorded step at once (D2)."""

    def late(model: Any, tracer: Any) -> list[Any]:
        rows = []
        for _ in tracer.iter[2:4]:
            rows.append(model.model.layers[3].output)
        return rows

    before = tapped.stats().steps
    found = tapped.trace(B, block=late, **GREEDY).saves["return"]
    after = tapped.stats().steps
    assert after["tapped"] - before["tapped"] == 2
    assert after["eager"] == before["eager"]
    right = llama.trace(B, block=late, **GREEDY).saves["return"]
    assert all(map(torch.equal, flat(found), flat(right)))


def test_another_engine_is_as_it_was(tapped: Any, llama: Any) -> None:
    """Beside an engine with taps one without serves every location; no switch is set (D9)."""
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in os.environ
    assert tapped.dispatched

    def reading(model: Any, tracer: Any) -> Any:
        return model.model.layers[1].self_attn.output

    assert llama.taps == ()
    assert llama.trace(A, block=reading, **GREEDY).saves["return"].shape == (5, 128)


def test_a_failed_replacement_is_one_requests(tapped: Any) -> None:
    """A misfit fails its request at its line; its neighbour goes on as alone (D5, D7)."""

    def reading() -> Any:
        return tapped.trace(B, block=everything, **GREEDY)

    alone = reading()
    with pytest.raises(InterventionError, match="must have the served shape"):
        with tapped.trace(**GREEDY) as tracer:
            with tracer.invoke(A):
                for step in tracer.all():
                    if step == 2:
                        tapped.model.layers[2].mlp.output = torch.zeros(1, 7)
            with tracer.invoke(B):
                rows = [].save()
                for _ in tracer.all():
                    rows.append(tapped.model.layers[3].output)
    assert len(rows) == 6
    right = [row[7] for row in alone.saves["return"]]
    for mine, its in zip(flat(rows), flat(right), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("step", [0, 2])
def test_other_locations_are_errors_at_their_line(tapped: Any, step: int) -> None:
    """In the prompt and behind it, with what to declare; the engine goes on (D2, D3, G35)."""
    with pytest.raises(InterventionError) as failure:
        with tapped.trace(A, **GREEDY) as tracer:
            for at in tracer.all():
                tapped.model.layers[1].output
                if at == step:
                    tapped.model.layers[2].self_attn.output  # refused
    cause = failure.value.__cause__
    assert isinstance(cause, OutOfOrderError)
    text = str(failure.value)
    assert f"'model.model.layers.2.self_attn.output.i{step}' is not a declared tap" in text
    assert "taps=[..., 'model.layers.2.self_attn.output']" in text
    assert f"line {line_of(__file__, 'refused')}" in text
    assert len(tapped.trace(A, block=everything, **GREEDY).saves["return"]) == 6


def test_writes_and_skips_elsewhere_are_errors(tapped: Any) -> None:
    """Assigning what was not declared, skipping and other operations are refused alike (D3)."""

    def write(model: Any, tracer: Any) -> None:
        model.model.layers[0].mlp.output = torch.zeros(5, 128)

    def leave_out(model: Any, tracer: Any) -> None:
        model.model.layers[2].mlp.skip(torch.zeros(5, 128))

    def operate(model: Any, tracer: Any) -> None:
        model.model.layers[0].self_attn.source.self_o_proj_0.output

    for block, said in (
        (write, r"'model\.layers\.0\.mlp\.output'"),
        (leave_out, r"assign 'model\.layers\.2\.mlp\.output'"),
        (operate, r"'model\.layers\.0\.self_attn\.source\.self_o_proj_0\.output'"),
    ):
        with pytest.raises(InterventionError, match=said):
            tapped.trace(A, block=block, **GREEDY)


def test_edits_of_the_engine_and_calls(tapped: Any, llama: Any) -> None:
    """Installed edits and calls of modules work as on any engine (D8)."""

    def lens(model: Any, tracer: Any) -> list[Any]:
        rows = []
        for _ in tracer.all():
            normed = model.model.norm(sum(model.model.layers[2].output))
            rows.append(model.logits_processor(model.lm_head, normed))
        return rows

    found = []
    for model in (llama, tapped):
        with model.edit() as (tracer, _):
            for _ in tracer.all():
                model.model.layers[1].output[0][:] *= 1.5
        try:
            found.append(flat(model.trace(A, block=lens, **GREEDY).saves["return"]))
        finally:
            model.clear_edits()
    assert len(found[0]) == 6
    assert all(map(torch.equal, *found))
    clean = flat(tapped.trace(A, block=lens, **GREEDY).saves["return"])
    assert not torch.equal(clean[0], found[0][0])


def test_a_cache_has_the_declared_outputs(tapped: Any) -> None:
    """`tracer.cache()` records the modules that were declared, in all steps (D8)."""
    with tapped.trace(A, **GREEDY) as tracer:
        cache = tracer.cache().save()
    assert sorted(cache.keys()) == [
        *(f"model.layers.{i}" for i in range(3)), "model.layers.2.mlp", "model.layers.3",
    ]  # fmt: skip
    assert len(cache["model.layers.3"].output) == 6


def test_a_hybrid_with_taps() -> None:
    """A model with a state has recorded steps too: none runs twice, values are equal (D10)."""
    give_experts_a_group()
    path = str(checkpoint("T-HYBRID", with_tokenizer=True))
    arguments = {**TINY, "dtype": "bfloat16"}
    taps = (
        "model.layers.*.output",
        "model.layers.*.mlp.output",
        "model.layers.0.linear_attn.input",
    )

    def reading(model: Any, tracer: Any) -> list[Any]:
        rows = []
        for _ in tracer.all():
            model.model.layers[1].mlp.output = model.model.layers[1].mlp.output * 2
            rows.append([*model.model.layers[3].output, model.logits])
        return rows

    found = []
    for given in ((), taps):
        with VLLM(path, taps=given, dispatch=True, **arguments) as model:
            if given:
                record_steps(model)
            traced = model.trace(A, block=reading, **GREEDY)
            found.append((traced.result.outputs[0].token_ids, flat(traced.saves["return"])))
            steps = model.stats().steps
    assert steps["tapped"] == 5
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


# --- the worker's part --------------------------------------------------------------------------


class Recording:
    """Counts what is recorded, at 10 bytes a graph and 100 for the first."""

    def __init__(self, count: int = 5):
        self.made: list[Any] = []
        self.count, self.error = count, None

    def serves(self, shape: Any) -> bool:
        """All are served."""
        return True

    def shapes(self) -> list[int]:
        """The largest first."""
        return list(range(self.count, 0, -1))

    def __call__(self, shape: Any, tapped: Any) -> Recorded:
        """Record nothing."""
        if self.error is not None:
            raise self.error
        self.made.append(shape)
        return Recorded(lambda forward, inputs: None, 10 << 20 if len(self.made) > 1 else 100 << 20)


def graphs(record: Any) -> DeclaredGraphs:
    """Graphs of no model."""
    needs = Needs(frozenset({Location("a", "output")}))
    return DeclaredGraphs(lambda found: found, record, needs)  # type: ignore[arg-type,return-value]


def test_graphs_are_captured_once() -> None:
    """One for each shape, the largest first, with their bytes; none for any other, now or later."""
    record = Recording()
    kept = graphs(record)
    assert kept.capture_all() == 140 << 20
    assert record.made == [5, 4, 3, 2, 1]
    assert kept.find(3, None) is not None  # type: ignore[arg-type]
    assert kept.find(6, None) is None  # type: ignore[arg-type]
    kept.capture()
    assert record.made == [5, 4, 3, 2, 1]
    assert kept.report()["captures"] == kept.report()["held"] == 5


@pytest.mark.parametrize(("count", "bytes_"), [(0, 0), (1, 100), (2, 110), (5, 140)])
def test_memory_is_estimated_from_two(count: int, bytes_: int) -> None:
    """Before the KV cache is sized two graphs are captured, and not kept."""
    record = Recording(count)
    kept = graphs(record)
    assert kept.estimate() == bytes_ << 20
    assert len(record.made) == min(count, 2)
    assert kept.report()["held"] == 0
    assert kept.find(count, None) is None  # type: ignore[arg-type]


def test_what_cannot_be_captured_fails_the_build() -> None:
    """The reason comes home with what to do (O12)."""
    record = Recording()
    record.error = RuntimeError("operation not permitted when stream is capturing")  # type: ignore[assignment]
    with pytest.raises(EngineBuildError, match="not permitted when stream is capturing.*\n.*taps="):
        graphs(record).capture_all()


def test_a_worker_checks_taps_again() -> None:
    """A loaded model that lacks what the tree had fails the build with what it has (O12)."""
    tree = Tree(Toy())
    assert declared(tree, []) is None
    found = declared(tree, [["layers.0", "output", None]])
    assert found is not None
    assert Location("layers.0", "output") in found
    with pytest.raises(EngineBuildError, match=r"'layers\.9\.output' names nothing"):
        declared(tree, [["layers.9", "output", None]])
    with pytest.raises(EngineBuildError, match="Its operations: .*torch_tanh_0"):
        declared(tree, [["layers.0.source.x_0", "output", "layers.0"]])


def test_no_memory_is_left_for_graphs_to_come(tapped: Any) -> None:
    """What an engine with taps captures is counted with vLLM's own graphs (O3)."""
    runner = runner_of(tapped)
    assert runner.graph_bytes == 0
