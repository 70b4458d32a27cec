"""The engine half: what runs inside vLLM's processes."""
