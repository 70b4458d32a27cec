"""The public names, and what importing them does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import midstream
from midstream.errors import NotInTraceError


def test_all_names_what_is_public() -> None:
    """`__all__` names exactly the public names, and each can be imported (O1)."""
    models = {"Model", "TransformersModel", "VLLM"}
    assert set(midstream.__all__) == {*models, "__version__", "errors", "save"}
    assert all(hasattr(midstream, name) for name in midstream.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that is not there is refused as Python's modules do."""
    with pytest.raises(AttributeError, match="no attribute 'VLMM'"):
        midstream.VLMM


def test_importing_is_light() -> None:
    """`import midstream` brings neither PyTorch nor vLLM nor Triton nor transformers."""
    heavy = ("torch", "transformers", "triton", "vllm")
    code = f"import midstream, sys; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_both_import_paths_give_one_class() -> None:
    """`midstream.VLLM` is `midstream.modeling.vllm.VLLM` (O1, A1)."""
    from midstream.modeling.vllm import VLLM

    assert midstream.VLLM is VLLM


def test_a_tensor_can_only_be_saved_in_a_block() -> None:
    """`tensor.save()` and `midstream.save(x)` outside a block say where they belong (C21, G20)."""
    assert midstream.VLLM is not None  # brings the models, and with them the method
    with pytest.raises(NotInTraceError):
        torch.ones(1).save()
    with pytest.raises(NotInTraceError):
        midstream.save(3)


def test_nothing_is_mounted_on_object() -> None:
    """Values other than tensors have no `save` of ours (O1, A8)."""
    assert midstream.VLLM is not None
    assert not any(hasattr(value, "save") for value in (3, "x", [], {}, None, object()))


def test_every_error_is_a_midstream_error() -> None:
    """The tree in the errors' docstring names exactly the classes there are."""
    names = set(midstream.errors.__all__)
    drawn = {
        word
        for line in (midstream.errors.__doc__ or "").splitlines()
        for word in line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()[:1]
        if word.endswith(("Error", "Warning"))
    }
    assert drawn == names
