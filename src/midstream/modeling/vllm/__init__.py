"""vLLM: the client half users hold and the engine half that runs inside its workers."""
