"""VLLM's process groups where engines of several kinds share a process."""

from __future__ import annotations


def give_experts_a_group() -> None:
    """Make the group that experts ask for, if the first engine here had none.

    Engines of one process share vLLM's groups, which the first of them made for its own needs.
    """
    from vllm.distributed import parallel_state as groups

    if groups.model_parallel_is_initialized() and groups._EP is None:
        groups._EP = groups.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")
