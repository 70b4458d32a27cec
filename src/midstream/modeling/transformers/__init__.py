"""HuggingFace models in this process: loading, inputs and settings."""
