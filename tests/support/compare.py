"""Comparing what the engine gave with what the oracle says."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.device import TOLERANCE

__all__ = ["assert_close", "relative_error"]

GUARD = 10.0
"""How many tolerances the known wrong candidate must be away from the right value."""


def relative_error(a: Any, b: Any) -> float:
    """Return ``max |a - b| / max |b|``, for trees the largest over their tensors.

    Trees are tuples, lists and dicts of tensors and None. Not-a-number anywhere gives
    not-a-number.

    Raises:
        AssertionError: the two differ in structure, in a shape, or in where None stands.
    """
    errors = [_leaf_error(*pair) for pair in _pairs(a, b, "value")]
    return float(torch.tensor(errors).max()) if errors else 0.0


def assert_close(got: Any, right: Any, wrong: Any, tol: float = TOLERANCE) -> None:
    """Assert that `got` is `right` within `tol`, having shown that the test could fail.

    `wrong` is what a known mistake would give: it must be at least ten tolerances away from
    `right`, else the comparison proves nothing. All three are tensors, or trees as in
    `relative_error`.
    """
    effect = relative_error(wrong, right)
    assert effect >= GUARD * tol, (
        f"the wrong candidate differs from the right value by {effect:.3g} only; this test "
        f"needs {GUARD * tol:.3g}: choose an input on which the mistake shows"
    )
    error = relative_error(got, right)
    assert error <= tol, f"relative error {error:.3g}, expected at most {tol:.3g}"


def _pairs(a: Any, b: Any, where: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors of two trees side by side."""
    if b is None:
        assert a is None, f"{where}: got {type(a).__name__}, expected None"
        return []
    if isinstance(b, torch.Tensor):
        assert isinstance(a, torch.Tensor), f"{where}: got {type(a).__name__}, expected a tensor"
        assert a.shape == b.shape, f"{where}: got {tuple(a.shape)}, expected {tuple(b.shape)}"
        return [(a, b)]
    same_kind = isinstance(a, dict) if isinstance(b, dict) else isinstance(a, (tuple, list))
    assert same_kind, f"{where}: got {type(a).__name__}, expected {type(b).__name__}"
    found, keys = ([*x] if isinstance(x, dict) else [*range(len(x))] for x in (a, b))
    assert set(found) == set(keys), f"{where}: got elements {found}, expected {keys}"
    return [pair for key in keys for pair in _pairs(a[key], b[key], f"{where}[{key!r}]")]


def _leaf_error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    if a.numel() == 0:
        return 0.0
    difference, scale = float((a - b).abs().max()), float(b.abs().max())
    if difference and not scale:
        return float("inf")
    return difference / scale if difference else 0.0
