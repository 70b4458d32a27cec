"""Blocks beside a toy model: rows, reads, writes, order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from midstream.errors import NotInTraceError, OutOfOrderError
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import LOGITS, Location
from midstream.interleaving.run import Run, current_run
from tests.interleaving.toy import Steps, Toy, rows


@pytest.fixture
def steps() -> Steps:
    return Steps()


def plain(inputs: list[torch.Tensor], **hooks: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The toy's logits and every layer's (hidden, residual), by hooks that may edit the output."""
    model, seen = Toy().requires_grad_(False), {}
    for index, layer in enumerate(model.layers):

        def hook(module: Any, args: Any, out: Any, index: int = index) -> Any:
            edit = hooks.get(f"layer{index}")
            out = edit(*out) if edit else out
            seen[index] = tuple(part.clone() for part in out)
            return out

        layer.register_forward_hook(hook)
    with torch.no_grad():
        hidden = model(torch.cat(inputs))
        ends = torch.tensor([len(part) for part in inputs]).cumsum(0) - 1
        return model.head(hidden[ends]), seen


def test_a_kept_value_stays_what_it_was(steps: Steps) -> None:
    """A read kept without a clone is the value at its location, though the model rewrites it.

    (O5, B13).
    """
    x, kept = rows(5, 1), []
    steps.step([x], [lambda: kept.append(steps.root.layers[0].output)])
    hidden, residual = plain([x])[1][0]
    later = plain([x])[1][1][1]
    assert not torch.allclose(residual, later, atol=1e-3)
    assert torch.equal(kept[0][0], hidden)
    assert torch.equal(kept[0][1], residual)


def test_each_block_sees_its_own_rows(steps: Steps) -> None:
    """Several blocks of one step each get their request's rows, in any waiting order (B9)."""
    parts, got = [rows(3, 1), rows(1, 2), rows(4, 3)], {}

    def block(name: int, layer: int) -> None:
        got[name] = steps.root.layers[layer].output[1]

    steps.step(parts, [lambda: block(0, 1), lambda: block(1, 0), lambda: block(2, 1)])
    seen = plain(parts)[1]
    assert torch.equal(got[0], seen[1][1][:3])
    assert torch.equal(got[1], seen[0][1][3:4])
    assert torch.equal(got[2], seen[1][1][4:])


class Batched(Toy):
    """Its layers work on ``[1, rows, width]``, as HuggingFace's do inside vLLM."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual, positions, hidden = None, torch.arange(len(hidden)), hidden[None]
        for layer in self.layers:
            hidden, residual = layer(positions, hidden=hidden, residual=residual)
        return (hidden + residual)[0]


def test_rows_may_stand_behind_an_axis_of_one() -> None:
    """A model with a batch axis of one serves each block its rows, read and written (B11)."""
    parts, found = [rows(3, 1), rows(2, 2)], []

    def run(steps: Steps, doubled: bool) -> torch.Tensor:
        def block(double: bool) -> None:
            residual = steps.root.layers[1].output[1]
            found.append(residual.clone())
            if double:
                residual *= 2.0

        return steps.step(parts, [lambda: block(False), lambda: block(doubled)])

    logits, right, clean = run(Steps(Batched()), True), run(Steps(), True), run(Steps(), False)
    assert [rows_.shape for rows_ in found[:2]] == [(1, 3, 4), (1, 2, 4)]
    assert torch.allclose(found[0][0], found[2], atol=1e-6)
    assert torch.allclose(found[1][0], found[3], atol=1e-6)
    assert torch.allclose(logits, right, atol=1e-6)
    assert not torch.allclose(right, clean, atol=1e-3)


@pytest.mark.parametrize("neighbour", [False, True])
def test_an_edit_in_place_reaches_the_model(steps: Steps, neighbour: bool) -> None:
    """Writing into a served value changes what the model goes on with, for those rows only.

    (B13, C62).
    """
    parts = [rows(3, 1), rows(2, 2)]
    blocks = [lambda: steps.root.layers[1].output[0].zero_()]
    if neighbour:
        blocks.append(lambda: steps.root.layers[1].output)
    got = steps.step(parts, blocks)

    def zero(hidden: torch.Tensor, residual: torch.Tensor) -> Any:
        hidden = hidden.clone()
        hidden[:3] = 0
        return hidden, residual

    right, clean = plain(parts, layer1=zero)[0], plain(parts)[0]
    assert not torch.allclose(right[0], clean[0], atol=1e-3)
    assert torch.equal(got, right)
    assert torch.equal(got[1], clean[1])


def test_a_replacement_reaches_the_model(steps: Steps) -> None:
    """Assigning an output gives the next module exactly the assigned value, and reads back.

    (B1, C62).
    """
    x, new, back = rows(3, 1), rows(3, 9), []

    def block() -> None:
        layer = steps.root.layers[0]
        _, residual = layer.output
        layer.output = (new, residual)
        back.append(layer.output[0])
        new.zero_()  # the block's own tensor is its own again

    expected = new.clone()
    got = steps.step([x], [block])
    right = plain([x], layer0=lambda h, r: (expected, r))[0]
    assert torch.equal(got, right)
    assert torch.equal(back[0], expected)


def test_an_input_can_be_replaced_without_touching_its_other_holders(steps: Steps) -> None:
    """Assigning an input changes that module only; writing in place changes the tensor (B1)."""
    x = rows(3, 1)

    def assign() -> None:
        mlp = steps.root.layers[0].mlp
        mlp.input = torch.zeros(3, 4)

    def keyword() -> None:
        args, kwargs = steps.root.layers[1].inputs
        assert [a.shape for a in args] == [(3,)]
        kwargs["hidden"].mul_(2)

    assert torch.equal(
        steps.step([x], [assign]),
        plain([x], layer0=lambda h, r: (Toy().layers[0].mlp.bias.expand(3, 4).clone(), r))[0],
    )
    assert torch.equal(steps.step([x], [keyword]), plain([x], layer0=lambda h, r: (h * 2, r))[0])

    def replaced() -> None:
        args, kwargs = steps.root.layers[1].inputs
        steps.root.layers[1].inputs = (args, {**kwargs, "hidden": kwargs["hidden"] * 2})

    held: list[torch.Tensor] = []  # another holder of what layer 1 is called with
    steps.model.layers[0].register_forward_hook(lambda *call: held.append(call[-1][0]))
    assert torch.equal(steps.step([x], [keyword]), steps.step([x], [replaced]))
    hidden = plain([x])[1][0][0]
    assert torch.equal(held[0], hidden * 2)
    assert torch.equal(held[1], hidden)


def test_first_keyword_is_the_input_of_a_module_called_by_keyword(steps: Steps) -> None:
    """`input` is the first positional argument, else the first keyword one (B1)."""
    got = []
    steps.step([rows(2, 1)], [lambda: got.append(steps.root.layers[2].input)])
    assert torch.equal(got[0], torch.arange(2))


def test_a_module_called_without_arguments_has_no_input() -> None:
    """Its `inputs` are empty, and `input`, read or assigned, is an error that says so (B2)."""

    class Constant(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(4)

    class Biased(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.bias = Constant()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden + self.bias())

    steps, got = Steps(Biased()), []

    def block(use: str) -> None:
        got.append(steps.root.bias.inputs)
        if use == "read":
            steps.root.bias.input
        elif use == "assign":
            steps.root.bias.input = torch.zeros(4)

    _, runs = steps.try_step([rows(3, 1)] * 3, [lambda u=u: block(u) for u in ("", *WAYS)])
    assert got == [((), {})] * 3
    assert runs[0].error is None
    for run in runs[1:]:
        assert isinstance(run.error, ValueError)
        assert "bias.input" in str(run.error)
        assert "without arguments" in str(run.error)


WAYS = ("read", "assign")


def test_a_wrong_shape_is_an_error_for_that_block_alone(steps: Steps) -> None:
    """A replacement of another shape raises in the block, naming both; its neighbour goes on.

    (O6, C63).
    """
    parts, kept = [rows(3, 1), rows(2, 2)], []

    def bad() -> None:
        steps.root.layers[0].output = (torch.zeros(2, 4), torch.zeros(3, 4))

    got, runs = steps.try_step(parts, [bad, lambda: kept.append(steps.root.layers[2].output[0])])
    assert isinstance(runs[0].error, ValueError)
    assert "([2, 4], [3, 4])" in str(runs[0].error)
    assert "([3, 4], [3, 4])" in str(runs[0].error)
    assert runs[1].error is None
    assert torch.equal(got, plain(parts)[0])
    assert torch.equal(kept[0], plain(parts)[1][2][0][3:])


@pytest.mark.parametrize("learned", [False, True])
def test_a_passed_location_is_refused_at_once(steps: Steps, learned: bool) -> None:
    """Reading an earlier layer after a later one raises at that line, also in the first step.

    (O8, C66).
    """
    x, after = rows(2, 1), []
    if learned:
        steps.step([x], [lambda: steps.root.layers[0].output])

    def block() -> None:
        later = steps.root.layers[2].output
        try:
            steps.root.layers[1].output
        finally:
            after.append(len(later))

    _, runs = steps.try_step([x], [block])
    assert isinstance(runs[0].error, OutOfOrderError)
    text = "'model.layers.1.output.i0' was requested but the model already ran past it"
    assert str(runs[0].error).startswith(text)
    assert f"above line {block.__code__.co_firstlineno + 1}" in str(runs[0].error)
    assert after == [2]


@pytest.mark.parametrize("learned", [False, True])
def test_a_location_that_does_not_run_is_an_error(steps: Steps, learned: bool) -> None:
    """A module the step never calls raises when the step ends, and the step's values stand."""
    x = rows(2, 1)
    if learned:
        steps.step([x], [lambda: steps.root.layers[0].output])
    got, runs = steps.try_step([x], [lambda: steps.root.unused.output])
    assert isinstance(runs[0].error, OutOfOrderError)
    assert "'model.unused.output.i0' did not run in this step" in str(runs[0].error)
    assert torch.equal(got, plain([x])[0])


def test_a_tensor_without_rows_cannot_be_changed(steps: Steps) -> None:
    """A tensor all requests share is served as a copy, and changing it is the block's error.

    (B12).
    """
    model = Toy()
    model.layers[0].mlp = Shared()
    steps = Steps(model)
    clean = steps.step([rows(3, 1)], [lambda: None])
    got, runs = steps.try_step(
        [rows(3, 1)], [lambda: steps.root.layers[0].mlp.inner.output[1].zero_()]
    )
    assert isinstance(runs[0].error, ValueError)
    assert "share" in str(runs[0].error)
    assert torch.equal(got, clean)


class Shared(torch.nn.Module):
    """A module whose inner part returns a table beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale rows by the table's sum."""
        rows, table = self.inner(x)
        return rows * table.sum()


class Pair(torch.nn.Module):
    """Returns rows and a table of 7."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both."""
        return x + 1, torch.arange(7.0)


@pytest.mark.parametrize("how", ["numpy", "data"])
def test_a_write_that_moves_no_version_lands_on_a_cpu(steps: Steps, how: str) -> None:
    """Writes through `.numpy()` and `.data` reach the model on a CPU."""
    x = rows(3, 1)

    def block() -> None:
        hidden = steps.root.layers[0].output[0]
        (hidden.numpy() if how == "numpy" else hidden.data)[:] = 0

    right = plain([x], layer0=lambda h, r: (torch.zeros_like(h), r))[0]
    assert not torch.allclose(right, plain([x])[0], atol=1e-3)
    assert torch.equal(steps.step([x], [block]), right)


def test_nan_rows_do_not_count_as_written(steps: Steps) -> None:
    """A value with NaN that the block only reads is left alone, also where rows are shared."""
    got, runs = steps.try_step(
        [torch.full((2, 4), float("nan"))], [lambda: steps.root.layers[0].output]
    )
    assert runs[0].error is None
    assert got.isnan().all()


def test_calling_a_module_is_not_traced_and_leaves_its_arguments(steps: Steps) -> None:
    """A module called on a block's value runs untraced, on copies of the arguments (A48)."""
    x, got = rows(3, 1), {}

    def block() -> None:
        hidden, residual = steps.root.layers[0].output
        before = residual.clone()
        got["called"] = steps.root.layers[1](torch.arange(3), hidden=hidden, residual=residual)
        got["kept"] = torch.equal(residual, before)
        got["read"] = steps.root.layers[1].output

    steps.step([x], [block])
    assert got["kept"]
    assert torch.equal(got["called"][0], got["read"][0])
    assert torch.equal(got["called"][1], got["read"][1])


def test_logits_are_served_and_written_per_request(steps: Steps) -> None:
    """The engine's own hand-over gives each block its one row, and takes edits back."""
    parts, got = [rows(3, 1), rows(2, 2)], []

    def block() -> None:
        run = current_run("logits")
        logits = run.at(LOGITS).read()
        got.append(logits.clone())
        logits[:, 0] = 100

    out = steps.step(parts, [block])
    clean = plain(parts)[0]
    assert torch.equal(got[0], clean[:1])
    assert out[0, 0] == 100
    assert torch.equal(out[1], clean[1])


def test_a_module_of_the_head_has_one_row_per_request(steps: Steps) -> None:
    """A module that runs on the sampled positions serves each request's row."""
    parts, got = [rows(3, 1), rows(2, 2)], []
    blocks = [lambda: None, lambda: got.append(steps.root.head.output)]
    steps.step(parts, blocks)
    assert torch.equal(got[0], plain(parts)[0][1:])


def test_modules_are_as_before_after_a_step(steps: Steps) -> None:
    """No module keeps anything of a step, also when the forward raises."""
    steps.step([rows(2, 1)], [lambda: steps.root.layers[1].output])
    with pytest.raises(RuntimeError):
        steps.try_step([torch.zeros(2, 3)], [lambda: steps.root.layers[1].output])
    steps.interleaver.finish_step(learned=False)
    assert all("forward" not in module.__dict__ for module in steps.model.modules())


def test_only_wanted_modules_are_touched_once_the_order_is_known(steps: Steps) -> None:
    """After the first step, a step replaces wanted modules and those that call them only."""
    steps.step([rows(2, 1)], [lambda: steps.root.layers[0].output])
    touched = []

    def block() -> None:
        steps.root.layers[1].mlp.output
        touched.extend(n for n, m in steps.model.named_modules() if "forward" in m.__dict__)

    steps.step([rows(2, 1)], [block])
    assert touched == ["", "layers.1", "layers.1.mlp"]


def test_output_of_a_module_after_something_inside_it(steps: Steps) -> None:
    """Once the order is known, too, a block may read inside a module and then its output."""
    steps.step([rows(2, 1)], [lambda: steps.root.layers[0].output])
    got = []

    def block() -> None:
        layer = steps.root.layers[1]
        got.append(layer.mlp.output)
        got.append(layer.output[0])

    for _ in range(2):
        steps.step([rows(2, 1)], [block])
    assert len(got) == 4
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[2], got[3])


def test_block_reads_back_its_own_write_beside_another_reader(steps: Steps) -> None:
    """A value assigned unread is read back as assigned, also where another block read before."""
    new, got = rows(3, 7), []

    def write() -> None:
        layer = steps.root.layers[0]
        layer.mlp.output = new
        got.append(layer.mlp.output)

    steps.step([rows(2, 1), rows(3, 2)], [lambda: steps.root.layers[0].mlp.output, write])
    assert torch.equal(got[0], new)


def test_values_outside_a_block_are_refused(steps: Steps) -> None:
    """Reading a location outside a running block says where it belongs (G21)."""
    with pytest.raises(NotInTraceError, match="outside a running block"):
        _ = steps.root.layers[0].output


def test_an_error_in_a_block_leaves_the_step_alone(steps: Steps) -> None:
    """A block that raises, exits or interrupts ends by itself; the step's values stand."""
    for error in (ZeroDivisionError("x"), SystemExit(3), KeyboardInterrupt()):

        def block(error: BaseException = error) -> None:
            steps.root.layers[0].output
            raise error

        got, runs = steps.try_step([rows(2, 1)], [block])
        assert runs[0].error is error
        assert torch.equal(got, plain([rows(2, 1)])[0])


def test_a_block_that_catches_everything_does_not_hold_the_step(steps: Steps) -> None:
    """A block that swallows the error of a missing location goes on to its end."""
    after = []

    def block() -> None:
        try:
            steps.root.unused.output
        except OutOfOrderError:
            after.append("caught")
        try:
            steps.root.layers[0].output
        except OutOfOrderError:
            after.append("refused")

    steps.step([rows(2, 1)], [block])
    assert after == ["caught", "refused"]


def test_a_block_that_cannot_be_unwound_is_left_behind(steps: Steps) -> None:
    """A block that catches its own unwinding is never resumed again, and nothing else changes."""
    parts, entered = [rows(2, 1), rows(3, 2)], []

    def stubborn() -> None:
        for _ in range(2):
            try:
                steps.root.layers[0].output
                steps.root.layers[2].output
            except BaseException as error:  # noqa: BLE001
                entered.append(type(error).__name__)

    run = Run(stubborn)
    steps.interleaver.begin_step([run])
    with steps.interleaver.phase({run: Rows(0, 2)}, (5,)):
        run.kill()
        assert run.done
    steps.interleaver.finish_step()
    assert entered == ["GreenletExit"]
    kept: list[Any] = []
    steps.step(parts, [lambda: kept.append(steps.root.layers[0].output)])
    assert len(kept) == 1
    assert entered == ["GreenletExit"]


def test_a_block_that_wants_no_module_leaves_the_forward_alone(steps: Steps) -> None:
    """A block that has ended or waits for logits wants no module, and teaches no order."""
    got = []

    def reads_logits() -> None:
        got.append(current_run("logits").at(LOGITS).read())
        got.append([n for n, m in steps.model.named_modules() if "forward" in m.__dict__])

    steps.step([rows(2, 1)], [lambda: None])
    steps.step([rows(2, 1)], [reads_logits])
    assert got[0].shape == (1, 6)
    assert got[1] == []
    got.clear()
    steps.step([rows(2, 1)], [lambda: got.append(steps.root.layers[2].output[0])])
    with pytest.raises(OutOfOrderError, match="already ran past it"):
        steps.step([rows(2, 1)], [lambda: [steps.root.layers[i].output for i in (2, 0)]])


def test_an_edit_of_one_of_two_leaves_that_share_memory_stays(steps: Steps) -> None:
    """A module may return one tensor twice; the untouched copy does not undo the other's edit."""
    value = torch.zeros(3, 4)
    run = Run(lambda: steps.root.layers[0].output[0].fill_(7))
    steps.interleaver.begin_step([run])
    leave = Location("layers.0", "output")
    steps.interleaver.hand_over(leave, (value, value), {run: Rows(0, 3)}, (3,))
    steps.interleaver.finish_step()
    assert torch.equal(value, torch.full((3, 4), 7.0))


@pytest.mark.parametrize("whole", [True, False])
def test_an_item_put_into_a_served_dictionary_is_not_lost_silently(
    steps: Steps, whole: bool
) -> None:
    """Keyword arguments change by assigning them all; one put into the dictionary is refused."""
    x = rows(3, 1)

    def block() -> None:
        args, kwargs = steps.root.layers[0].inputs
        kwargs["hidden"] = torch.zeros_like(kwargs["hidden"])
        if whole:
            steps.root.layers[0].inputs = (args, kwargs)
        kwargs.pop("residual")
        assert not steps.root.layers[0].mlp.input.any()

    _, [run] = steps.try_step([x], [block])
    if whole:
        assert run.error is None
    else:
        assert isinstance(run.error, ValueError)
        assert "Assign the whole value to `.inputs`" in str(run.error)
