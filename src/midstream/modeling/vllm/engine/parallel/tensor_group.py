"""The ranks that vLLM divides a model among, as they reach each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TensorGroup:
    """VLLM's tensor parallel ranks, see ``Group``.

    Words go from CPU to CPU, so that nothing waits for a GPU; tensors go from GPU to GPU.

    Attributes:
        rank, size: this one's number, and how many there are.
        exchanges: how often they have given each other something.
    """

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.exchanges = 0
        self._cpu, self._device = group.cpu_group, group.device_group

    def words(self, mine: list[int]) -> list[list[int]]:
        """All ranks' numbers, in their order."""
        self.exchanges += 1
        found = torch.empty(self.size * len(mine), dtype=torch.int64, device="cpu")
        with torch.inference_mode():
            sent = torch.tensor(mine, dtype=torch.int64, device="cpu")
            _gather(found, sent, group=self._cpu)
        rows: list[list[int]] = found.view(self.size, -1).tolist()
        return rows

    def objects(self, mine: Any) -> list[Any]:
        """All ranks' plain data, in their order."""
        self.exchanges += 1
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._cpu)
        return found

    def room(self, mine: torch.Tensor) -> torch.Tensor:
        """Memory for all ranks' tensors."""
        shape = (self.size, *mine.shape)
        return torch.empty(shape, dtype=mine.dtype, device=mine.device)

    def pieces(self, mine: torch.Tensor, room: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors, in their order. As bytes: no arithmetic is done on them."""
        self.exchanges += 1
        if mine.numel():
            sent, into = mine.detach().contiguous().view(-1), room.view(-1)
            _gather(into.view(torch.uint8), sent.view(torch.uint8), group=self._device)
        return list(room.unbind(0))
