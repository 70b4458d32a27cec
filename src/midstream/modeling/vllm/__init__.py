"""vLLM: the client half users hold and the engine half that runs inside its processes."""

from midstream.modeling.vllm.model import VLLM

__all__ = ["VLLM"]
