"""Several invokes in one forward: each has its rows, and what has none is whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from midstream import Model, save
from midstream.errors import InterventionError, UnsupportedError
from midstream.interleaving.copies import Rows
from midstream.modeling.local.batching import Inputs, stacked
from tests.support.local_modules import MLP, Routed, WithBuffers, drawn, far, rows

X, Y = rows(2, 1), rows(3, 2)
BOTH = torch.cat([X, Y])


def test_inputs_are_put_behind_each_other() -> None:
    """Tensors are joined along their first axis; what is equal for all stays (H15)."""
    first = Inputs((X, {"mask": X > 0}), {"scale": 2.0, "seed": None})
    second = Inputs((Y, {"mask": Y > 0}), {"scale": 2.0, "seed": None})
    batch = stacked([first, second])
    assert torch.equal(batch.args[0], BOTH)
    assert torch.equal(batch.args[1]["mask"], BOTH > 0)
    assert batch.kwargs == {"scale": 2.0, "seed": None}
    assert batch.spans == [Rows(0, 2), Rows(2, 5)]
    assert batch.total == 5


def test_one_input_is_passed_as_it_is() -> None:
    """A lone input is not copied."""
    batch = stacked([Inputs((X,), {})])
    assert batch.args[0] is X
    assert (batch.spans, batch.total) == ([Rows(0, 2)], 2)


@pytest.mark.parametrize(
    "second",
    [
        Inputs((rows(3, width=5),), {}),
        Inputs((X, X), {}),
        Inputs((X,), {"scale": 2.0}),
        Inputs(("text",), {}),
    ],
)
def test_inputs_that_do_not_fit_are_refused(second: Inputs) -> None:
    """Inputs that differ in more than their first axis are refused, with both forms (H14)."""
    with pytest.raises(UnsupportedError, match=r"\(\[2, 4\]\).*(padding|one after the other)"):
        stacked([Inputs((X,), {}), second])


def test_a_plain_argument_that_differs_is_shown() -> None:
    """The refusal shows the values of plain arguments, and under which names they were given."""
    with pytest.raises(UnsupportedError, match=r"got \(\[2, 4\], scale=1\) and .*, scale=2\)"):
        stacked([Inputs((X,), {"scale": 1}), Inputs((X,), {"scale": 2})])


def test_inputs_without_a_row_each_are_refused() -> None:
    """A tensor that has not as many rows as its input is refused beside others."""
    with pytest.raises(UnsupportedError, match="has no row for each"):
        stacked([Inputs((X, torch.ones(7)), {}), Inputs((Y, torch.ones(7)), {})])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_each_invoke_has_its_rows(mode: object) -> None:
    """Reads, edits and replacements are of the invoke's own rows (H15, H17, H20)."""
    module = drawn(MLP)
    model = Model(module)
    with mode():  # type: ignore[operator]
        hidden = module.first(BOTH).detach()
        edited = hidden.clone()
        edited[:2, 0] = 3.0
        edited[2:] = edited[2:] * 2
        expected = module.last(module.act2(module.second(module.act(edited))))
        with model.trace() as tracer:
            with tracer.invoke(X):
                mine = model.first.output.clone().save()
                model.first.output[:, 0] = 3.0
                out = model.output.save()
            with tracer.invoke(Y):
                theirs = model.first.output.save()
                model.first.output = theirs * 2
                other = model.output.save()
        assert torch.equal(mine, hidden[:2])
        assert torch.equal(theirs, hidden[2:])
        assert torch.equal(torch.cat([out, other]), expected)
        assert torch.equal(tracer.result, expected)
        assert far(expected, module(BOTH))


def test_an_invoke_without_an_input_sees_all_rows() -> None:
    """It takes its turn where it stands: it sees what invokes above it wrote (H16)."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.first.output[:] = 1.0
        with tracer.invoke():
            hidden = model.first.output.clone().save()
            model.second.output[:, 0] = 2.0
        with tracer.invoke(Y):
            second = model.second.output.save()
            out = model.output.save()
    assert torch.equal(hidden[:2], torch.ones(2, 8))
    assert torch.equal(hidden[2:], module.first(BOTH)[2:])
    assert (second[:, 0] == 2.0).all()
    assert far(out, module(Y))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tensors_without_rows_are_whole(mode: object) -> None:
    """A buffer is whole, even one as long as the batch; of several blocks none edits it (H17)."""
    module = drawn(WithBuffers)
    model = Model(module)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])  # two invokes of it: as many rows as the buffer has
    with mode():  # type: ignore[operator]
        with model.trace() as tracer:
            with tracer.invoke(ids):
                (_, scale, shift), _ = model.product.inputs
                scale.save()
                shift.save()
            with tracer.invoke(ids):
                out = model.output.save()
        assert torch.equal(scale, module.scale)
        assert torch.equal(shift, module.shift)
        assert torch.equal(out, module(torch.cat([ids, ids]))[2:])
        with pytest.raises(InterventionError, match=r"tensor \[4\] whose first axis is not"):
            with model.trace() as tracer:
                with tracer.invoke(ids):
                    model.product.inputs[0][1][:] = 2.0
                with tracer.invoke(ids):
                    out = model.output.save()
    assert torch.equal(module.scale, drawn(WithBuffers).scale)


def test_one_of_several_skips() -> None:
    """Rows that skip a module are as alone, the others' as without (H21, O7)."""
    module = drawn(MLP)
    model = Model(module)
    value = rows(2, 7, width=8)
    with model.trace(X):
        model.second.skip(value)
        alone = model.output.save()
    for _ in range(2):
        with model.trace() as tracer:
            with tracer.invoke(X):
                model.second.skip(value)
                mine = model.output.save()
            with tracer.invoke(Y):
                theirs = model.output.save()
        assert torch.equal(mine, alone)
        assert torch.equal(theirs, module(BOTH)[2:])
    assert far(alone, module(X))
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    module.second = Counted(8, 8)
    model = Model(module)
    with model.trace(X):
        model.second.output
    calls.clear()
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.second.skip(value)
        with tracer.invoke(Y):
            model.second.skip(rows(3, 8, width=8))
            out = model.output.save()
    assert calls == []
    assert torch.equal(out, module.last(module.act2(torch.cat([value, rows(3, 8, width=8)])))[2:])


def test_names_of_several_invokes_are_lists() -> None:
    """A name saved in several invokes is a list; containers saved above them are filled (O16)."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace() as tracer:
        appended = save([])
        slots = save([None, None])
        keyed = save({})
        with tracer.invoke(X):
            hidden = model.first.output.save()
            appended.append(len(hidden))
            slots[0] = "x"
            keyed["x"] = 1
        with tracer.invoke(Y):
            hidden = model.first.output.save()
            appended.append(len(hidden))
            slots[1] = "y"
            keyed["y"] = 2
            only = save(4)
    assert [len(each) for each in hidden] == [2, 3]
    assert appended == [2, 3]
    assert slots == ["x", "y"]
    assert keyed == {"x": 1, "y": 2}
    assert only == 4


def test_settings_that_differ_are_refused() -> None:
    """Invokes that ask for different calls cannot share one."""
    model = Model(drawn(Routed))
    with pytest.raises(UnsupportedError, match="trace them one after the other"):
        with model.trace() as tracer:
            with tracer.invoke(X, order="ab"):
                model.a.output
            with tracer.invoke(Y, order="ba"):
                model.b.output


def test_caches_of_several_invokes() -> None:
    """Each cache has its invoke's rows after all edits; the whole batch's has all (H16, H20)."""
    module = drawn(MLP)
    model = Model(module)
    with model.trace() as tracer:
        with tracer.invoke(X):
            mine = tracer.cache()
            model.first.output[:] = 1.0
        with tracer.invoke(Y):
            theirs = tracer.cache(modules=[model.first, model.last], include_inputs=True)
        with tracer.invoke():
            whole = tracer.cache()
            model.second.output[:, 0] = 2.0
    assert torch.equal(mine["first"].output, torch.ones(2, 8))
    assert torch.equal(theirs["first"].output, module.first(BOTH)[2:])
    assert torch.equal(whole["first"].output, torch.cat([torch.ones(2, 8), module.first(BOTH)[2:]]))
    assert (mine["second"].output[:, 0] == 2.0).all()
    assert torch.equal(theirs["last"].output, whole["last"].output[2:])
    assert theirs["last"].input.shape == (3, 8)


def test_gradients_of_several_blocks_that_edit() -> None:
    """Edits of an edited model, of an invoke and of the whole batch are in each gradient (H22)."""
    module = drawn(MLP)
    model = Model(module)
    with model.edit() as (_, edited):
        model.first.output[:, 2] *= 5.0
    with edited.trace() as tracer:
        with tracer.invoke(X):
            hidden = edited.first.output
            hidden[:, 0] *= 2.0
            loss = edited.output.pow(2).sum()
            with loss.backward(retain_graph=True):
                mine = hidden.grad.save()
        with tracer.invoke():
            hidden = edited.first.output
            hidden[:, 1] *= 3.0
            loss = edited.output.pow(2).sum()
            with loss.backward():
                whole = hidden.grad.save()
    scale = torch.tensor([2.0, 3.0, 5.0, *[1.0] * 5])
    left = (module.first(X) * scale).detach().requires_grad_()
    loss = module.last(module.act2(module.second(module.act(left)))).pow(2).sum()
    (expected,) = torch.autograd.grad(loss, left)
    assert expected.abs().max() > 0
    torch.testing.assert_close(whole, expected)
    expected[:, 1] *= 3.0  # the whole batch's edit came after
    torch.testing.assert_close(mine, expected)
    module.zero_grad()
