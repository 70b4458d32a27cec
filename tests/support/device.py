"""Where engines of tests run, and how exact they are there."""

from __future__ import annotations

import torch

ON_GPU = torch.version.cuda is not None
"""Whether this PyTorch is made for a GPU; asking for the GPU itself would initialise it here."""

DEVICE = "cuda" if ON_GPU else "cpu"
"""Where an engine's values lie."""

TOLERANCE = 3e-3 if ON_GPU else 1e-4
"""Relative error of an engine in fp32: on a GPU, vLLM's attention multiplies in TF32."""
