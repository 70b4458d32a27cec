"""Forwards recorded with breaks at declared locations: whatever blocks do there, they serve it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import OutOfOrderError
from midstream.interleaving.breaks import DeclaredForward, _Break
from midstream.interleaving.copies import Rows
from midstream.interleaving.declared import Declared
from midstream.interleaving.locations import Location
from midstream.interleaving.recording import open_cache
from midstream.interleaving.run import Run, current_run
from midstream.interleaving.source import find_source
from tests.interleaving.test_tapped import Body, Decoding, steps
from tests.interleaving.toy import Toy
from tests.support.recorders import PlainRecorder

WIDTH = 4


class Parts(torch.nn.Module):
    """What a recording could get wrong: aliases, results in arguments, a value behind a helper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mixer = Mixer()
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 6)
        self.unused = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, width]`` to ``[rows, width]``."""
        hidden = self.embed(hidden)
        residual = hidden
        normed = self.norm(hidden)
        mixed = torch.zeros_like(normed)
        self.mixer(normed, mixed)
        hidden = residual + mixed
        shared = hidden.view(-1, 2, WIDTH // 2)
        shared.mul_(1.5)
        return self.last(squared(hidden))


class Mixer(torch.nn.Module):
    """Writes its result into an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, output: torch.Tensor) -> None:
        """Leave the result in ``output``, [rows, width]."""
        output.copy_(torch.tanh(self.inner(hidden)))


def squared(value: torch.Tensor) -> torch.Tensor:
    """A helper with an operation of its own."""
    return torch.square(value)


class DecodingDeclared(Decoding):
    """As `Decoding`, with the locations declared; tapped or not, blocks may ask for no others."""

    uses_source = True

    def __init__(self, taps: tuple[str, ...], *, tapped: bool, model: torch.nn.Module):
        super().__init__(tapped=tapped, model=model)
        self.interleaver.declared = Declared(map(self._location, taps))

    def _location(self, tap: str) -> Location:
        path, _, side = tap.rpartition(".")
        operation = find_source(self.tree, path)
        if operation is None:
            return Location(path, side)
        return getattr(operation, "_enter" if side == "input" else "_leave")  # type: ignore[no-any-return]

    def _replay(self, guess: Any, spans: dict[Run, Rows], hidden: torch.Tensor) -> Any:
        recorder, tapped = PlainRecorder(), DeclaredForward(self.interleaver, guess.needs)
        with self.interleaver.tapping.phase(tapped, spans, (len(hidden),), [hidden]):
            found = recorder.run(tapped, self.model.forward, {"hidden": hidden})
        self.kinds.append("tapped")
        self.breaks.append(recorder.breaks)
        return found


def compared(
    *bodies: Callable[[list[Any]], Body],
    taps: tuple[str, ...],
    model: Callable[[], torch.nn.Module] = Parts,
    edits: bool = True,
) -> DecodingDeclared:
    """The same blocks beside recorded forwards and by hand: values and outputs are equal.

    Args:
        bodies: each gives a block that appends what it has seen to a list.
        edits: whether they change what the model returns.
    """
    found, seen = {}, {}
    for tapped in (False, True):
        at = found[tapped] = DecodingDeclared(taps, tapped=tapped, model=model())
        kept = seen[tapped] = [[] for _ in bodies]  # type: ignore[var-annotated]
        runs = at.run(*(body(one) for body, one in zip(bodies, kept, strict=True)))
        assert [run.error for run in runs] == [None] * len(runs)
    assert set(found[True].kinds[1:]) == {"tapped"}
    for mine, its in zip(seen[True], seen[False], strict=True):
        assert len(mine) == len(its)
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
    plain = DecodingDeclared(taps, tapped=False, model=model())
    plain.run(*([lambda at: None] * len(bodies)))
    changed = False
    for mine, its, clean in zip(
        found[True].outputs, found[False].outputs, plain.outputs, strict=True
    ):
        assert torch.equal(mine, its)
        changed = changed or not torch.equal(mine, clean)
    assert changed == edits
    return found[True]


ALL = (
    *("embed.output", "norm.input", "norm.output", "mixer.input", "mixer.inner.output"),
    *("last.input", "last.output", "output", "input"),
    *(
        "source.residual_0.output",
        "source.hidden_view_0.output",
        "source.torch_zeros_like_0.output",
    ),
    *("source.squared_0.input", "source.squared_0.source.torch_square_0.output"),
    *("source.shared_mul__0.output", "source.mixed_0.output"),
    *("mixer.source.torch_tanh_0.output", "source.hidden_1.output"),
)


def test_a_forward_that_nobody_touches_is_as_it_was() -> None:
    """With breaks everywhere, aliases and results that lie in arguments come out right (D1, D4)."""

    def body(kept: list[Any]) -> Body:
        def reading(at: Decoding) -> None:
            root = at.root
            for _ in steps():
                kept.append(root.embed.output)
                kept.append(root.source.residual_0.output)
                kept.append(root.norm.input)
                kept.append(root.mixer.source.torch_tanh_0.output)
                kept.append(root.source.squared_0.source.torch_square_0.output)
                kept.append(root.last.output)

        return reading

    found = compared(body, taps=ALL, edits=False)
    assert found.breaks[0] == found.breaks[-1] > len(ALL)  # those behind tapped calls too
    for tap in ALL:
        compared(lambda kept: lambda at: next(iter(steps()), None), taps=(tap,), edits=False)


@pytest.mark.parametrize(
    "edit",
    [
        lambda root: setattr(root.norm, "input", root.norm.input * 3 + 1),
        lambda root: setattr(root.norm, "output", root.norm.output * 3),
        lambda root: setattr(root.embed, "output", -root.embed.output),
        lambda root: root.embed.output.add_(1),
        lambda root: setattr(root.mixer, "input", root.mixer.input * 2),
        lambda root: setattr(root.source.residual_0, "output", root.source.residual_0.output * 2),
        lambda root: setattr(root.source.hidden_1, "output", root.source.hidden_1.output + 1),
        lambda root: setattr(
            root.source.squared_0.source.torch_square_0,
            "output",
            root.source.squared_0.source.torch_square_0.output + 2,
        ),
        lambda root: setattr(root.source.squared_0, "input", root.source.squared_0.input - 1),
        lambda root: setattr(root.mixer.inner, "output", torch.ones(2, WIDTH)),
        lambda root: setattr(root.last, "output", root.last.output * 2),
        lambda root: setattr(root, "input", root.input + 1),
        lambda root: setattr(root, "output", root.output * 2),
    ],
)
def test_edits_are_those_of_eager_steps(edit: Callable[[Any], None]) -> None:
    """Replacements and edits in place land as by hand, also where others hold the tensor (D5)."""

    def editing(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                edit(at.root)

        return body

    def watching(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                kept.append(at.root.last.output)

        return body

    compared(editing, watching, taps=ALL)


def test_an_edit_in_place_is_seen_by_all_holders() -> None:
    """What is written into an argument is in the residual stream too, which is the same tensor."""

    def editing(kept: list[Any]) -> Body:
        def body(at: Decoding) -> None:
            for _ in steps():
                at.root.norm.input.mul_(3)
                kept.append(at.root.last.input)

        return body

    compared(editing, taps=("embed.output", "norm.input", "last.input"))


def test_a_pair_whose_residual_is_rewritten() -> None:
    """Layers that rewrite their arguments in place, with breaks at both sides of each."""
    taps = tuple(f"layers.{i}.{side}" for i in range(3) for side in ("input", "output"))

    def body(kept: list[Any]) -> Body:
        def editing(at: Decoding) -> None:
            for step in steps():
                kept.extend(at.root.layers[0].output)
                layer = at.root.layers[1]
                positions, named = layer.inputs
                layer.inputs = (positions, {**named, "residual": named["residual"] + step})
                layer.output = (layer.output[0] * 2, layer.output[1])
                kept.extend(at.root.layers[2].output)

        return editing

    compared(body, taps=taps, model=Toy)


def test_blocks_of_a_first_decode_step_need_no_order() -> None:
    """A recorded forward serves though no step has shown the order of the modules."""

    def body(at: Decoding) -> None:
        for _ in steps():
            at.root.layers[0].output
            at.root.layers[2].output
            with pytest.raises(OutOfOrderError, match=r"'model\.layers\.1\.output\.i\d' was"):
                at.root.layers[1].output

    taps = tuple(f"layers.{i}.output" for i in range(3))
    at = DecodingDeclared(taps, tapped=True, model=Toy())
    (run,) = at.run(body)
    assert run.error is None
    assert at.kinds == ["eager", "tapped", "tapped", "tapped", "tapped"]
    assert not at.interleaver.order.known


def test_what_is_declared_but_not_reached() -> None:
    """A tap on a module that the forward does not call is an error of the block that asks."""
    at = DecodingDeclared(("unused.output", "layers.1.output"), tapped=True, model=Toy())

    def body(at: Decoding) -> None:
        for _ in steps():
            at.root.unused.output

    (run,) = at.run(body)
    assert isinstance(run.error, OutOfOrderError)
    assert "did not run in this step" in str(run.error)
    assert at.kinds[1] == "tapped"


@pytest.mark.parametrize("tapped", [False, True])
def test_other_locations_are_refused(tapped: bool) -> None:
    """A location that was not declared is an error at once, in eager steps too (D2, D3, G35)."""
    refused = {
        "layers.2.mlp.output": lambda root: root.layers[2].mlp.output,
        "layers.1.input": lambda root: root.layers[1].inputs,
        "layers.1.source.torch_tanh_0.output": lambda root: (
            root.layers[1].source.torch_tanh_0.output
        ),
    }
    at = DecodingDeclared(("layers.1.output",), tapped=tapped, model=Toy())
    for tap, ask in refused.items():

        def body(at: Decoding, ask: Any = ask) -> None:
            for _ in steps():
                at.root.layers[1].output
                ask(at.root)

        (run,) = at.run(body)
        assert isinstance(run.error, OutOfOrderError)
        assert f"taps=[..., '{tap}']" in str(run.error)
        assert "Declared: 'layers.1.output'." in str(run.error)


def test_a_skip_is_refused_with_what_to_write() -> None:
    """Skipping is no tap: the output is to be assigned (A33)."""
    at = DecodingDeclared(("layers.1.output",), tapped=True, model=Toy())

    def body(at: Decoding) -> None:
        at.root.layers[1].skip((torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)))

    (run,) = at.run(body)
    assert isinstance(run.error, OutOfOrderError)
    assert "assign 'layers.1.output'" in str(run.error)


def cached(**settings: Any) -> Any:
    """A block that records from its first step on, with two layers' outputs declared."""
    at = DecodingDeclared(("layers.0.output", "layers.2.output"), tapped=True, model=Toy())
    found: list[Any] = []

    def body(at: Decoding) -> None:
        sides = {"sides": frozenset(settings.get("sides", ("output",)))}
        found.append(open_cache(current_run("cache"), at.tree, settings.get("modules"), sides))
        for _ in steps():
            pass

    (run,) = at.run(body)
    return at, run, found


def test_a_cache_records_what_was_declared() -> None:
    """A cache of all modules has the declared ones, in prompts and in recorded steps (D8)."""
    at, run, (cache,) = cached(sides=("output", "input"))
    assert run.error is None
    assert at.kinds == ["eager", "tapped", "tapped", "tapped", "tapped"]
    assert cache.keys() == ["layers.0", "layers.2"]
    assert len(cache["layers.2"].output) == 5
    assert list(cache.visits["layers.2"]) == ["output"]


@pytest.mark.parametrize("settings", [{"modules": ["layers.1"]}, {"sides": ("input",)}])
def test_a_cache_of_what_was_not_declared(settings: Any) -> None:
    """A module by name, or a side that no module has declared, is an error (D8)."""
    _, run, _ = cached(**settings)
    assert isinstance(run.error, OutOfOrderError)
    assert "`tracer.cache()`: 'model." in str(run.error)


def test_nothing_is_served_while_it_is_recorded() -> None:
    """A break does nothing until its forward is under way beside blocks (D15)."""
    at = DecodingDeclared(("layers.0.output",), tapped=True, model=Toy())
    recorder = PlainRecorder()
    assert at.interleaver.declared is not None
    forward = DeclaredForward(at.interleaver, at.interleaver.declared.guess.needs)
    hidden = torch.ones(3, WIDTH)
    value = recorder.run(forward, at.model.forward, {"hidden": hidden})
    assert recorder.breaks == 1
    assert torch.equal(value, at.model(hidden))
    assert "forward" not in vars(at.root.layers[0]._module)


def test_what_is_held_is_what_the_recorder_gives() -> None:
    """Breaks keep no tensor of the forward itself, which would pin a graph's memory (D15)."""
    at = DecodingDeclared(ALL, tapped=True, model=Parts())
    made: list[Any] = []

    class Weak(PlainRecorder):
        """Gives copies to hold on to, and keeps what is done at breaks."""

        def hold(self, tensor: torch.Tensor) -> torch.Tensor:
            made.append(weakref.ref(tensor))
            return tensor.clone()

        def pause(self, serve: Callable[[], None]) -> None:
            self.breaks += 1
            kept.append(serve)

    kept: list[Any] = []
    assert at.interleaver.declared is not None
    forward = DeclaredForward(at.interleaver, at.interleaver.declared.guess.needs)
    hidden = torch.ones(3, WIDTH)
    with torch.inference_mode():
        forward.record(Weak(), at.model.forward, {"hidden": hidden})
    parameters = {id(each) for each in at.model.parameters()}
    alive = [ref() for ref in made]
    assert len(kept) > len(ALL)
    assert [x for x in alive if x is not None and x is not hidden and id(x) not in parameters] == []


def test_what_nobody_changed_is_not_copied() -> None:
    """A result goes on in a tensor that is filled again where a block has written or replaced."""
    live = torch.arange(6.0).view(3, 2)
    at, passed = _Break.make((live, live + 1), PlainRecorder(), lambda leaf: True)
    first, second = passed
    assert torch.equal(first, live)
    assert first.data_ptr() != live.data_ptr()
    first.fill_(-1)  # would be overwritten by a copy
    versions = at.versions()
    at.take(at.held, versions)
    assert torch.equal(first, torch.full((3, 2), -1.0))
    at.held[0].narrow(0, 1, 1).mul_(10)
    at.take(at.held, versions)
    assert first.tolist() == [[0.0, 1.0], [20.0, 30.0], [4.0, 5.0]]
    at.take((at.held[0], torch.zeros(3, 2)), at.versions())
    assert second.tolist() == [[0.0, 0.0]] * 3
    with torch.inference_mode():  # nothing is counted there: it is copied each time
        at, (first, _) = _Break.make((live.clone(), live + 1), PlainRecorder(), lambda leaf: True)
        at.held[0].fill_(7)
        at.take(at.held, at.versions())
        assert first.tolist() == [[7.0, 7.0]] * 3


def test_arguments_are_given_back() -> None:
    """A replacement is put into an argument for the time of the call, unless that is its result."""
    given, result = torch.ones(3, 2), torch.ones(3, 2)
    at, passed = _Break.make(((given, result), {}), PlainRecorder(), lambda leaf: False)
    assert passed[0][0] is given
    undo = at.undoing((result.view(6), None))
    new = torch.full((3, 2), 5.0)
    at.take(((new, new), {}), at.versions())
    assert torch.equal(given, new)
    assert torch.equal(result, new)
    undo()
    assert torch.equal(given, torch.ones(3, 2))
    assert torch.equal(result, new)
    undo()  # a run without a replacement
    assert torch.equal(given, torch.ones(3, 2))
