"""Read and edit a language model mid-forward, while vLLM serves it."""
