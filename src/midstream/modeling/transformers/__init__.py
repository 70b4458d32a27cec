"""HuggingFace models in this process: loading, inputs, settings, and the model users hold."""

from midstream.modeling.transformers.model import TransformersModel

__all__ = ["TransformersModel"]
