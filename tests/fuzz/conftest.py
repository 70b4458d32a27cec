"""Fixtures of the fuzz tests."""

from tests.modeling.vllm.conftest import hf, oracle

__all__ = ["hf", "oracle"]
