"""`TransformersModel`: its calls, its life and what it leaves behind."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import TransformersModel
from midstream.errors import MidstreamWarning, UnsupportedError
from tests.support.checkpoints import A, B
from tests.support.hooking import hooked
from tests.support.local_checkpoints import random_model

Models = Callable[[str], TransformersModel]


def plain(model: TransformersModel, ids: list[int]) -> torch.Tensor:
    """The logits of plain transformers, of all positions."""
    found: torch.Tensor = model.module(torch.tensor([ids])).logits
    return found


# Loading.


def test_a_scan_loads_nothing_and_the_first_run_all(folder: Callable[[str], Path]) -> None:
    """A lazy model is scanned on the meta device, and a trace loads it (H3, H27, case 46)."""
    model = TransformersModel(folder("T-LLAMA"))
    layer = model.model.layers[1]
    with model.scan(A) as tracer:
        value = layer.mlp.output.save()
        shape = layer.output.shape.save()
    assert (shape, tracer.result.logits.shape) == ((1, 5, 128), (1, 5, 128))
    assert (model.dispatched, value.shape) == (False, (1, 5, 128))
    assert {each.device.type for each in model.module.parameters()} == {"meta"}
    with model.trace(A):
        stream = layer.output.save()
    assert (model.dispatched, model.module.device.type) == (True, "cpu")
    assert bool(stream.abs().sum() > 0)


def test_names_hold_on_lazy_models(folder: Callable[[str], Path], llama: TransformersModel) -> None:
    """Further names reach the same modules, before and after the weights are there (H1, H3)."""
    model = TransformersModel(folder("T-LLAMA"), rename={"model.layers": "blocks", "mlp": "ff"})
    with model.trace(A):
        renamed = model.blocks[1].ff.output.save()
    with llama.trace(A):
        right = llama.model.layers[1].mlp.output.save()
        other = llama.model.layers[2].mlp.output.save()
    assert torch.equal(renamed, right)
    assert not torch.allclose(renamed, other)
    with pytest.raises(ValueError, match="'logits' is taken"):
        TransformersModel(folder("T-LLAMA"), rename={"model.layers": "logits"})


def test_an_edited_copy_of_a_lazy_model_loads_it(folder: Callable[[str], Path]) -> None:
    """An edit before the weights are there acts when they are (H3, H23)."""
    model = TransformersModel(folder("T-LLAMA"))
    with model.edit() as (_, edited):
        edited.model.norm.output[:] = 0
    assert edited.trace(A, trace=False).logits.abs().max() == 0
    assert model.dispatched
    assert plain(model, A).abs().max() > 1


def test_a_ready_module_keeps_its_mode(traced: Models) -> None:
    """A module in training mode draws the dropout that it draws alone (H1, H28)."""
    module = random_model("T-BLOOM", hidden_dropout=0.5).train()
    model = TransformersModel(module)
    torch.manual_seed(1)
    right, after = module(torch.tensor([A])).logits, torch.rand(1)
    torch.manual_seed(1)
    with model.trace(A) as tracer:
        stream = model.transformer.h[0].output.save()
    assert torch.equal(tracer.result.logits, right)
    assert torch.equal(torch.rand(1), after)
    assert module.training
    assert not torch.allclose(module.eval()(torch.tensor([A])).logits, right, atol=1e-2)
    del stream


def test_attention_weights(folder: Callable[[str], Path], llama: TransformersModel) -> None:
    """With eager attention a block reads the weights that transformers returns (H5, H20)."""
    model = TransformersModel(
        folder("T-LLAMA"), attn_implementation="eager", dtype=torch.float32, dispatch=True
    )
    with model.trace(A):
        weights = model.model.layers[1].self_attn.output[1].save()
    right = model.module(torch.tensor([A]), output_attentions=True).attentions
    assert weights.shape == (1, 4, 5, 5)
    assert torch.equal(weights, right[1])
    assert not torch.allclose(weights, right[0], atol=1e-2)
    with llama.trace(A):
        absent = llama.model.layers[1].self_attn.output[1].save()
    assert absent is None


def test_half_precision(folder: Callable[[str], Path]) -> None:
    """In bf16 an edit by an fp32 vector is what it is in a hook (H4, H20)."""
    model = TransformersModel(folder("T-LLAMA"), dtype=torch.bfloat16, dispatch=True)
    vector = torch.linspace(-8, 8, 128)
    clean = plain(model, A)
    with hooked(model.module, {"model.layers.1": lambda output: output.add_(vector)}):
        right = plain(model, A)
    with model.trace(A) as tracer:
        model.model.layers[1].output[:] += vector
    assert tracer.result.logits.dtype == torch.bfloat16
    assert torch.equal(tracer.result.logits, right)
    assert not torch.allclose(clean, right, atol=0.5)


# Calls.


def test_plain_calls(llama: TransformersModel) -> None:
    """Without a block a call gives what transformers gives, inputs made ready (H9, H10, H28)."""
    right = plain(llama, A)
    assert torch.equal(llama.trace(A, trace=False).logits, right)
    assert torch.equal(llama.trace("t11 t12 t13 t14 t15", trace=False).logits, right)
    assert torch.equal(llama(A).logits, right)
    ids = llama.module.generate(torch.tensor([A]), max_new_tokens=3)
    assert torch.equal(llama.generate(A, max_new_tokens=3), ids)
    both = llama.generate([A, B], max_new_tokens=3)
    assert torch.equal(both[:1], ids)
    alone = llama.module.generate(torch.tensor([B]), max_new_tokens=3)
    assert torch.equal(both[1, -3:], alone[0, -3:])


def test_results_are_what_the_call_returned(llama: TransformersModel) -> None:
    """`tracer.result` is the output, the ids or what transformers was asked for (H9, H10)."""
    with llama.trace(A) as tracer:
        inside = tracer.result.logits.save()
    assert torch.equal(inside, plain(llama, A))
    assert inside is tracer.result.logits
    with llama.generate(
        A, max_new_tokens=3, return_dict_in_generate=True, output_logits=True
    ) as tracer:
        logits = [].save()
        for _ in tracer.iter[:]:
            logits.append(llama.logits)
    assert torch.equal(torch.stack(tracer.result.logits), torch.stack(logits))
    assert tracer.result.sequences.shape == (1, 8)


def test_hidden_states_that_a_call_asks_for(llama: TransformersModel) -> None:
    """`output_hidden_states=True` in the call gives the streams that a block reads and edits."""
    right = llama.module(torch.tensor([A]), output_hidden_states=True).hidden_states
    with llama.trace(A, output_hidden_states=True) as tracer:
        stream = llama.model.layers[1].output.save()
    assert torch.equal(tracer.result.hidden_states[2], stream)
    assert all(map(torch.equal, tracer.result.hidden_states, right))
    with llama.trace(A, output_hidden_states=True) as tracer:
        llama.model.layers[1].output[:] = 0
    assert not tracer.result.hidden_states[2].any()
    assert right[2].any()


def test_a_pipeline_runs_with_a_block(traced: Models) -> None:
    """A pipeline gives its records, without a block as transformers' own, and edited (H9)."""
    model = traced("T-BERT-CLASSES")
    right = model.pipeline("t5 t6")
    assert model.pipe("t5 t6") == right
    wanted = (int(right[0]["label"][-1]) + 1) % 3
    with model.pipe("t5 t6") as tracer:
        clean = model.logits.clone().save()
        model.logits[:, wanted] = 100
    assert clean.shape == (1, 3)
    assert tracer.result[0]["label"] == f"LABEL_{wanted}" != right[0]["label"]
    for texts in (("t5 t6", "t7"), ("t5 t6", "t5 t6")):
        with pytest.raises(UnsupportedError, match="one after the other"):
            with model.pipe() as tracer:
                for text in texts:
                    with tracer.invoke(text):
                        model.logits.sum()


def test_a_pipeline_in_chunks_is_a_step_for_each(folder: Callable[[str], Path]) -> None:
    """A pipeline that makes several forwards of one input is met in each of them (H9, H18)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MidstreamWarning)
        model = TransformersModel(folder("T-BERT-CLASSES"), task="zero-shot-classification")
    labels = ["t7", "t8", "t9"]
    right = model.pipe("t5 t6", candidate_labels=labels)
    with model.pipe("t5 t6", candidate_labels=labels) as tracer:
        rows = [].save()
        for _ in tracer.iter[:]:
            rows.append(len(model.logits))
    assert (tracer.result, rows) == (right, [1, 1, 1])
    with model.pipe("t5 t6", candidate_labels=labels, batch_size=3) as tracer:
        rows = len(model.logits).save()
    assert rows == 3


def test_a_pipeline_that_generates_has_tokens(llama: TransformersModel) -> None:
    """A text pipeline's tokens are met and forced like those of `generate` (H9, H11)."""
    with llama.pipe("t5 t6", max_new_tokens=3, do_sample=False) as tracer:
        tokens = [].save()
        for step in tracer.iter[:]:
            if step == 1:
                llama.samples[:] = 9
            tokens.append(llama.samples.item())
    clean = llama.generate("t5 t6", max_new_tokens=2)[0, 2:].tolist()
    assert tokens[:2] == [clean[0], 9] != clean
    said = tracer.result[0]["generated_text"].removeprefix("t5 t6").split()
    assert said == [f"t{token}" for token in tokens]


def test_what_cannot_generate_says_so(traced: Models) -> None:
    """A model without a decoding loop is refused by `generate`, which names `trace`."""
    with pytest.raises(UnsupportedError, match=r"BertForSequenceClassification cannot generate"):
        traced("T-BERT-CLASSES").generate([5, 6])


# Blocks.


def test_blocks_run_in_the_forwards_thread(llama: TransformersModel) -> None:
    """A block is in the thread that traces, which is the one that runs the model (H29)."""
    seen: dict[str, Any] = {}

    def work() -> None:
        forwards = []
        hook = llama.module.register_forward_hook(
            lambda *call: forwards.append(threading.get_ident())
        )
        with llama.trace(A):
            llama.model.layers[1].output.sum()
            thread = threading.get_ident().save()
        hook.remove()
        seen["threads"] = (thread, forwards, threading.get_ident())

    other = threading.Thread(target=work)
    other.start()
    other.join()
    thread, forwards, own = seen["threads"]
    assert (thread, forwards) == (own, [own])
    assert thread != threading.get_ident()


def test_two_threads_take_turns(llama: TransformersModel) -> None:
    """Threads that trace one model at once each get their own prompt's values (H29)."""
    right = {len(ids): plain(llama, ids)[:, -1] for ids in (A, B)}
    wrong: list[Any] = []

    def work(ids: list[int]) -> None:
        try:
            for _ in range(5):
                with llama.trace(ids):
                    logits = llama.logits.save()
                if not torch.equal(logits, right[len(ids)]):
                    wrong.append(logits)
        except BaseException as error:  # noqa: BLE001  # told by the assertion below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(ids,)) for ids in (A, B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
