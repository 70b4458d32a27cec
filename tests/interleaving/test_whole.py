"""The short way of a value that only one block of a batch is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from midstream import Model
from midstream.errors import InterventionError
from midstream.interleaving.beside import LocalInterleaver
from tests.support.local_modules import MLP, drawn, far, rows

X = rows(2, 1)
Made = list[Any]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The locations of which an event was made."""
    made: Made = []
    make = LocalInterleaver._live

    def noted(self: LocalInterleaver, location: Any, *rest: Any) -> Any:
        made.append(location)
        return make(self, location, *rest)

    monkeypatch.setattr(LocalInterleaver, "_live", noted)
    return made


def read(layer: Any) -> torch.Tensor:
    """Read only."""
    return layer.output  # type: ignore[no-any-return]


def read_input(layer: Any) -> torch.Tensor:
    """Read an argument."""
    return layer.input  # type: ignore[no-any-return]


def written(layer: Any) -> torch.Tensor:
    """Write in place."""
    value = layer.output
    value[:, 0] = 7.0
    return value  # type: ignore[no-any-return]


def twice(layer: Any) -> torch.Tensor:
    """Write in place, assign what is made of it, and write into that."""
    layer.output[:, 1] *= 2
    layer.output = layer.output + 1
    layer.output[:, 0] = 3.0
    return layer.output  # type: ignore[no-any-return]


def assigned(layer: Any) -> torch.Tensor:
    """Assign without reading."""
    layer.output = torch.full((2, 8), 2.0)
    return layer.output  # type: ignore[no-any-return]


def argument(layer: Any) -> torch.Tensor:
    """Write into an argument."""
    value = layer.input
    value *= 3
    return value  # type: ignore[no-any-return]


def behind(layer: Any) -> torch.Tensor:
    """Write where no version counter sees it."""
    value = layer.output
    value.detach().numpy()[:, 2] = 5.0
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("work", [read, read_input, written, twice, assigned, argument, behind])
def test_the_short_way_is_the_long_one(work: Callable[[Any], torch.Tensor], mode: Any) -> None:
    """A block alone in its batch meets and leaves what it does beside another one."""
    model = Model(drawn(MLP))
    with mode():
        with model.trace(X):
            alone = work(model.first).save()
            alone_out = model.output.save()
        with model.trace() as tracer:
            with tracer.invoke(X):
                beside = work(model.first).save()
                beside_out = model.output.save()
            with tracer.invoke():
                pass
        plain = model.module(X)
    assert torch.equal(alone, beside)
    assert torch.equal(alone_out, beside_out)
    assert alone_out.requires_grad == beside_out.requires_grad == (mode is torch.enable_grad)
    assert torch.equal(alone_out, plain) == (work in (read, read_input))
    if work not in (read, read_input):
        assert far(alone_out, plain)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_reading_makes_no_event(mode: Any, events: Made) -> None:
    """What is only read goes the short way, arguments too, and the block's value stays its own."""

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            hidden += 1.0
            return hidden * 2.0

    module = drawn(After)
    model = Model(module)
    with mode():
        with model.trace(X):
            given = model.up.input.save()
            value = model.up.output.save()
        expected = module.up(X)
    assert events == []
    assert torch.equal(given, X)
    assert given.data_ptr() != X.data_ptr()
    assert torch.equal(value, expected)


def test_an_edit_of_a_live_tensor_makes_no_event(events: Made) -> None:
    """Where gradients flow, what a block writes in place is there already; a copy goes back."""
    model = Model(drawn(MLP))
    with model.trace(X):
        model.first.output[:] = 0
        out = model.output.save()
    assert events == []
    assert far(out, model.module(X))
    with torch.no_grad(), model.trace(X):
        model.first.output[:] = 0
        copied = model.output.save()
    assert [location.path for location in events] == ["first"]
    assert torch.equal(out, copied)


def test_a_gradient_that_is_stopped_stays_stopped() -> None:
    """A live tensor that the block detaches in place is what the model goes on with."""
    model = Model(drawn(MLP))
    with model.trace(X):
        model.first.output.detach_()
        out = model.output.save()
    out.sum().backward()
    assert model.module.first.weight.grad is None
    assert model.module.last.weight.grad is not None


def test_a_shape_that_does_not_fit_is_the_blocks_error() -> None:
    """A live tensor that was given another shape in place fails at the block's line."""
    model = Model(drawn(MLP))
    with pytest.raises(InterventionError, match="expand|size|shape"), model.trace(X):
        value = model.first.output
        value.transpose_(0, 1)
        _ = model.output.save()


def test_what_is_put_into_a_dictionary_is_refused() -> None:
    """A tensor put into the dictionary that a value was read as is told, as everywhere."""

    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x * 1.0}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Named()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)["x"] * 2

    model = Model(Outer())
    with pytest.raises(InterventionError, match="was put into the list or dictionary"):
        with model.trace(X):
            model.inner.output["x"] = torch.zeros(2, 4)
            _ = model.output.save()
