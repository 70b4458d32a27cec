"""Objects kept in the engine with `model.put`."""

from __future__ import annotations

import copy as copy_module
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError, TransportError, UnsupportedError
from tests.conftest import TINY
from tests.modeling.vllm.conftest import model_of, runner_of
from tests.support.changes import add_vector
from tests.support.checkpoints import A, B
from tests.support.device import ON_GPU
from tests.support.oracle import Oracle, assert_close

GREEDY = {"temperature": 0.0, "ignore_eos": True}
VECTOR = torch.linspace(-3, 3, 128)


class Probe(torch.nn.Module):
    """A linear probe with a scale, its weight known by two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.read = torch.nn.Linear(128, 2)
        self.tied = self.read.weight
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Read two numbers of each row, [tokens, 2]."""
        return self.dropout(self.read(rows)) * self.scale


@pytest.fixture
def model(serving: Any) -> Iterator[Any]:
    """The engine on T-LLAMA, with nothing stored before and after."""
    assert dict(serving.stored) == {}
    yield serving
    serving.clear_edits()
    for handle in list(serving.stored.values()):
        handle.remove()
    assert names(serving) == []


def names(model: Any) -> list[str]:
    """What the engine's worker has stored."""
    (found,) = model.vllm_entrypoint.collective_rpc("midstream_stored")
    return found


def tokens(output: Any) -> list[int]:
    """The generated ids of an output."""
    return list(output.outputs[0].token_ids)


def steered(hf: Oracle, prompt: Any, factor: float = 1.0) -> list[int]:
    """Five tokens under the vector, added after layer 1 in every step."""
    return hf.generate(prompt, 5, changes=[add_vector(1, factor * VECTOR)]).tokens


def test_a_vector_is_used_by_its_handle_and_by_name(model: Any, hf: Oracle) -> None:
    """In a block the handle, and `model.stored[name]`, are the tensor itself."""
    vector = model.put("vector", VECTOR)
    assert names(model) == ["vector"]
    assert steered(hf, A) != hf.generate(A, 5).tokens
    with model.trace(A, max_tokens=5, **GREEDY) as tracer:
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += vector
    assert tokens(tracer.result) == steered(hf, A)
    with model.trace(A, max_tokens=5, **GREEDY) as tracer:
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += model.stored["vector"]
        same = (model.stored["vector"] is vector).save()
        back = vector.save()
    assert tokens(tracer.result) == steered(hf, A)
    assert same
    assert torch.equal(back, VECTOR)


def test_a_module_runs_in_blocks(model: Any, hf: Oracle) -> None:
    """A module is called on the block's values, in evaluation mode, its tied weight one tensor."""
    probe = Probe()
    stored = model.put("probe", probe)
    with model.trace(A, max_tokens=1, **GREEDY):
        score = stored(sum(model.model.layers[2].output)).save()
        tied = (stored.tied is stored.read.weight).save()
    reads = hf.reads(A)
    right, wrong = (probe.eval()(reads[f"residual.{layer}"]).detach() for layer in (2, 1))
    assert_close(score, right, wrong)
    assert tied
    assert probe.read.weight.requires_grad  # the user's own is left alone


def test_an_edit_uses_it_and_follows_a_replacement(model: Any, hf: Oracle) -> None:
    """An edit looks the object up for each request, so replacing it needs no new edit."""
    vector = model.put("vector", VECTOR)
    with model.edit() as (tracer, _):
        for _ in tracer.all():
            model.model.layers[1].output[0][:] += vector

    def generated() -> list[int]:
        (output,) = model.generate(A, max_tokens=5, **GREEDY)
        return tokens(output)

    assert generated() == steered(hf, A)
    assert model.put("vector", -VECTOR) is vector
    assert generated() == steered(hf, A, -1.0) != steered(hf, A)


def test_a_request_keeps_the_object_it_began_with(model: Any, hf: Oracle) -> None:
    """Replacing or removing an object in the middle of a request changes nothing for it."""
    model.put("vector", VECTOR)
    store = runner_of(model).blocks.stored
    steps = 0

    def change(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            store.objects = {"vector": 100 * VECTOR}
        if steps == 4:
            store.remove("vector")

    hook = model_of(model).get_submodule("model.embed_tokens").register_forward_pre_hook(change)
    try:
        with model.trace(A, max_tokens=5, **GREEDY) as tracer:
            for _ in tracer.all():
                model.model.layers[1].output[0][:] += model.stored["vector"]
    finally:
        hook.remove()
    assert steps == 5
    assert names(model) == []
    assert tokens(tracer.result) == steered(hf, A)


def test_it_does_not_travel_with_the_request(model: Any) -> None:
    """A block that uses a large object by its handle stays small."""
    big = torch.zeros(1 << 20)
    handle = model.put("big", big)
    with model.trace(A, run=False, max_tokens=1, **GREEDY) as tracer:
        total = float(handle.sum()).save()
    assert len(tracer.to_bytes()) < 5000
    with model.trace(A, run=False, max_tokens=1, **GREEDY) as carrying:
        total = float(big.sum()).save()
    assert len(carrying.to_bytes()) > 4 << 20


WRITES = ["item", "augmented", "method", "view", "data", "out", "inplace", "list", "parameter"]


@pytest.mark.parametrize("what", WRITES)
def test_no_block_may_write_into_it(model: Any, what: str) -> None:
    """All requests share it: a write in place is that block's error, and nothing has changed."""
    vector, probe = model.put("vector", VECTOR), model.put("probe", Probe())
    with pytest.raises(InterventionError, match="shared by all requests.*model.put") as met:
        with model.trace(A, max_tokens=1, **GREEDY):
            if what == "item":
                vector[3] = 0
            elif what == "augmented":
                vector += 1
            elif what == "method":
                vector.zero_()
            elif what == "view":
                vector[2:].view(-1).fill_(0)
            elif what == "data":
                vector.data.zero_()
            elif what == "out":
                torch.add(vector, 1, out=vector)
            elif what == "inplace":
                torch.nn.functional.relu(vector, inplace=True)
            elif what == "list":
                torch._foreach_add_([vector], 1)
            else:
                probe.read.weight[:] = 0
    assert isinstance(met.value.__cause__, ValueError)
    with pytest.raises(InterventionError, match="numpy" if ON_GPU else "read-only"):
        with model.trace(A, max_tokens=1, **GREEDY):
            vector.numpy()[:] = 0
    with pytest.raises(InterventionError, match="does not support item assignment"):
        with model.trace(A, max_tokens=1, **GREEDY):
            model.stored["vector"] = 0
    with model.trace(A, max_tokens=1, **GREEDY):
        after = vector.save()
        weight = probe.read.weight.save()
        copy = vector.clone()
        copy[:] = 0
        zeros = copy.save()
        twin = copy_module.deepcopy(vector)
        twin += 1
        model.model.layers[0].mlp.output[:] = vector
        kind = type(vector + 1).__name__.save()
    assert kind == "Tensor"
    assert torch.equal(after, VECTOR)
    assert torch.equal(weight, Probe().read.weight)
    assert not zeros.any()


def test_removing(model: Any) -> None:
    """What is removed is gone for later blocks, whose error says what there is."""
    vector, other = model.put("vector", VECTOR), model.put("other", VECTOR)
    assert list(model.stored) == ["vector", "other"]
    assert repr(vector) == "Stored('vector')"
    with model.edit(name="uses"):
        vector.sum()
    vector.remove()
    vector.remove()
    assert (vector.removed, other.removed) == (True, False)
    assert repr(vector) == "Stored('vector', removed)"
    assert names(model) == list(model.stored) == ["other"]
    with pytest.raises(TransportError, match="'vector' has been removed from the engine"):
        with model.trace(A, max_tokens=1):
            vector.sum()
    with pytest.raises(InterventionError, match=r"'vector' is not stored.*stored: 'other'"):
        with model.trace(A, max_tokens=1):
            pass
    model.clear_edits()


def test_unknown_names_say_what_there_is(model: Any) -> None:
    """A name nobody stored is an error in the client and in a block, naming those there are."""
    with pytest.raises(KeyError, match=r"'probe' is not stored.*stored: nothing.*model.put"):
        model.stored["probe"]
    model.put("vector", VECTOR)
    with pytest.raises(InterventionError, match=r"'probe' is not stored.*stored: 'vector'") as met:
        with model.trace(A, max_tokens=1):
            model.stored["probe"]
    assert isinstance(met.value.__cause__, KeyError)
    with model.trace(A, max_tokens=1):
        known = ("probe" in model.stored).save()
    assert known is False


def test_what_cannot_be_stored_is_refused(model: Any) -> None:
    """Other values than tensors and modules, a name that is none, and what cannot travel."""
    with pytest.raises(TypeError, match="takes a tensor or a torch.nn.Module; got list"):
        model.put("values", [1.0])
    with pytest.raises(TypeError, match="name is text; got int"):
        model.put(1, VECTOR)
    with pytest.raises(TypeError, match="got Node"):
        model.put("layer", model.model.layers[0])
    locked = Probe()
    locked.lock = threading.Lock()
    with pytest.raises(TransportError, match=r"'locked' \(a Probe\) cannot travel.*thread.lock"):
        model.put("locked", locked)
    with pytest.raises(InterventionError) as caught:
        with model.trace(A, max_tokens=1):
            model.put("vector", VECTOR)
    assert isinstance(caught.value.__cause__, UnsupportedError)
    assert names(model) == []


def test_stored_objects_end_with_their_engine(model: Any) -> None:
    """`put` builds the engine, and `close()` takes what it held; another model's is refused."""
    with VLLM(model.repo, **TINY) as fresh:
        handle = fresh.put("vector", VECTOR)
        assert fresh.dispatched
        with pytest.raises(TransportError, match="stored in the engine of another model"):
            with model.trace(A, max_tokens=1):
                handle.sum()
        fresh.close()
        assert handle.removed
        assert dict(fresh.stored) == {}
        handle.remove()
        with pytest.raises(TransportError, match="has been removed"):
            with fresh.trace(B, max_tokens=1):
                handle.sum()
        assert not fresh.dispatched
