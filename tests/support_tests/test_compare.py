"""The comparison fails when it should."""

import pytest
import torch

from tests.support.compare import assert_close, relative_error

RIGHT = torch.tensor([[1.0, -4.0], [0.5, 2.0]])


def test_relative_error_is_scaled_by_the_largest_right_value() -> None:
    """The error is max |a - b| / max |b|, over trees the largest of the tensors'."""
    off = RIGHT.clone()
    off[1, 0] += 0.02
    assert relative_error(off, RIGHT) == pytest.approx(0.005, rel=1e-4)
    assert relative_error((RIGHT, None, {"x": off}), (RIGHT, None, {"x": RIGHT})) == pytest.approx(
        0.005, rel=1e-4
    )
    assert relative_error(torch.ones(1), torch.zeros(1)) == float("inf")
    assert relative_error(torch.zeros(1), torch.zeros(1)) == 0.0


@pytest.mark.parametrize(
    ("got", "right"),
    [
        (RIGHT[0], RIGHT),
        ((RIGHT,), RIGHT),
        (RIGHT, (RIGHT[0], RIGHT[1])),
        ((RIGHT, RIGHT), (RIGHT, None)),
        ((RIGHT, None), (RIGHT, RIGHT)),
        ((RIGHT,), (RIGHT, RIGHT)),
        ({"a": RIGHT}, {"b": RIGHT}),
        ((RIGHT,), {0: RIGHT}),
    ],
)
def test_another_structure_is_an_error(got: object, right: object) -> None:
    """Another shape, length, key or place of None fails, never broadcasts."""
    with pytest.raises(AssertionError, match="expected"):
        relative_error(got, right)


def test_wrong_value_fails() -> None:
    """A value further away than the tolerance fails, as does one that is not a number."""
    assert_close(RIGHT + 1e-5, RIGHT, wrong=RIGHT + 1)
    for got in (RIGHT + 1e-2, RIGHT * float("nan")):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(got, RIGHT, wrong=RIGHT + 1)


@pytest.mark.parametrize("wrong", [RIGHT, RIGHT + 3e-3, RIGHT * float("nan")])
def test_weak_wrong_candidate_fails(wrong: torch.Tensor) -> None:
    """A wrong candidate within ten tolerances of the right value fails, whatever was got."""
    with pytest.raises(AssertionError, match="wrong candidate"):
        assert_close(RIGHT, RIGHT, wrong=wrong)
