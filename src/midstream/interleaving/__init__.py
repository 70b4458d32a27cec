"""A block runs beside a forward pass of any `torch.nn.Module`.

Importing this package gives tensors a `save` method, which is `midstream.save`: functions that a
block calls can save tensors as the block itself does. Nothing else of PyTorch is touched.
"""

import torch

from midstream.tracing.saves import save

torch.Tensor.save = save  # type: ignore[attr-defined]
