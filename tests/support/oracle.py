"""The right answers: HuggingFace's forward of a checkpoint, told in vLLM's locations.

``Oracle(path).reads(ids)`` gives, for each location a block can read on vLLM, the value it must
have; ``run`` and ``generate`` give logits and tokens under changes. Everything is fp32, eager
attention, one prompt, no batch axis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.support.architectures import ARCHITECTURES
from tests.support.changes import (
    LOGITS,
    Change,
    add_vector,
    applied,
    edit_layer,
    edit_logits,
    edit_mlp_input,
    edit_module,
    edited,
    replace_layer,
    scale_layer,
    zero_mlp,
)
from tests.support.compare import assert_close, relative_error
from tests.support.reads import end_values, layer_values, locations, recorded

__all__ = [
    "KINDS",
    "Change",
    "Oracle",
    "Result",
    "add_vector",
    "assert_close",
    "edit_layer",
    "edit_logits",
    "edit_mlp_input",
    "edit_module",
    "relative_error",
    "replace_layer",
    "scale_layer",
    "zero_mlp",
]

KINDS = ("inputs", "input", "output")
"""Last part of a location key; `Oracle.reads` also has ``logits`` and ``residual.<layer>``."""

When = Literal["prefill", "all"] | Collection[int]


@dataclass(frozen=True)
class Result:
    """What a run ends with.

    Attributes:
        logits: [steps, vocab], what each step sampled from (after changes, before forcing).
        tokens: the token of each step.
    """

    logits: Tensor
    tokens: list[int]


class Oracle:
    """HuggingFace's model of the checkpoint in folder `path`, as the reference for vLLM's.

    Args:
        path: the checkpoint.
        dtype: fp32 for the right values; another shows what that dtype alone changes.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32):
        from transformers import AutoModelForCausalLM

        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=dtype
        ).eval()
        self.architecture = ARCHITECTURES[self.model.config.model_type]
        self.layer_count: int = self.model.config.num_hidden_layers

    @property
    def checked_layers(self) -> tuple[int, ...]:
        """The first, a middle and the last layer."""
        return tuple(sorted({0, self.layer_count // 2, self.layer_count - 1}))

    @cached_property
    def without_counterpart(self) -> dict[str, str]:
        """Locations of vLLM's tree that `reads` leaves out, each with the reason."""
        head = "element 0 is the head module, element 1 the last row of the final norm's output"
        return {
            "lm_head": "vLLM never calls the head: the logits processor uses its weight",
            "logits_processor.inputs": head,
            "logits_processor.input": "the head module itself",
            **{
                self.architecture.layer_path(layer, module): reason
                for module, reason in self.architecture.uncalled.items()
                for layer in range(self.layer_count)
            },
        }

    @cached_property
    def shared(self) -> dict[str, str]:
        """Module paths that are one object on vLLM, each with the path it is first found at.

        `reads` has a value for each of the paths: what the call made by that layer sees.
        """
        return {
            self.architecture.layer_path(layer, module): self.architecture.layer_path(0, module)
            for module in self.architecture.shared
            for layer in range(1, self.layer_count)
        }

    @torch.no_grad()
    def reads(self, ids: Sequence[int], layers: Collection[int] | None = None) -> dict[str, Any]:
        """Return the value of every location at the prefill of prompt `ids`.

        Keys are ``<module path>.<kind>`` with vLLM's module paths and the `KINDS`: `output` is a
        tensor or a tuple as vLLM returns it, `inputs` is (args, kwargs), `input` the first
        argument. Rows are [tokens, width] without a batch axis; ids and positions are int64
        (vLLM may use int32). Beside them: ``residual.<i>``, the stream leaving each layer, and
        ``logits``, [1, vocab]. The root module has the bare kinds as keys.

        Args:
            ids: token ids of the prompt.
            layers: the layers to describe; `checked_layers` when left out.
        """
        with recorded(self.model) as seen:
            logits = self._forward(ids, (), None)
        values = layer_values(self.architecture, seen, self.layer_count)
        found = {f"residual.{i}": layer["stream_out"] for i, layer in enumerate(values)}
        for i in self.checked_layers if layers is None else layers:
            for module, call in self.architecture.calls(i).items():
                found |= locations(self.architecture.layer_path(i, module), call, values[i])
        ends = end_values(self.architecture, seen, values[-1], ids)
        for path, call in self.architecture.ends.items():
            found |= locations(path, call, ends)
        return {**found, "logits_processor.output": logits, "logits": logits}

    def run(self, ids: Sequence[int], changes: Sequence[Change] = ()) -> Result:
        """Return logits, [1, vocab], and next token of prompt `ids` under `changes`."""
        return self.generate(ids, 1, changes=changes)

    @torch.no_grad()
    def generate(
        self,
        ids: Sequence[int],
        n: int,
        force: Mapping[int, int] | None = None,
        changes: Sequence[Change] = (),
        when: When = "all",
        eos: int | None = None,
    ) -> Result:
        """Generate `n` tokens greedily with a KV cache.

        Args:
            ids: token ids of the prompt.
            n: number of tokens; the prefill is step 0.
            force: token to take at a step instead of the likeliest.
            changes: edits of the forward.
            when: the steps that `changes` apply at. Keys and values computed under a change stay
                in the cache for the steps after it.
            eos: token that ends the generation (it is kept); none by default.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        rows: list[Tensor] = []
        tokens: list[int] = []
        step_ids = list(ids)
        for step in range(n):
            rows.append(self._forward(step_ids, changes if _active(when, step) else (), cache))
            tokens.append((force or {}).get(step, int(rows[-1].argmax())))
            step_ids = tokens[-1:]
            if tokens[-1] == eos:
                break
        return Result(torch.cat(rows), tokens)

    def _forward(self, ids: Sequence[int], changes: Sequence[Change], cache: Any) -> Tensor:
        """Run one step and return the logits of its last position, [1, vocab]."""
        start = 0 if cache is None else cache.get_seq_length()
        hooked = [(self._module(c), c) for c in changes if c.module != LOGITS]
        with applied(hooked, start):
            output = self.model(
                torch.tensor([list(ids)]), past_key_values=cache, use_cache=cache is not None
            )
        logits: Tensor = output.logits[0, -1:]
        for change in changes:
            if change.module == LOGITS:
                logits = edited(change, logits, start)
        return logits

    def _module(self, change: Change) -> nn.Module:
        path = self.architecture.roles.get(change.module, change.module)
        module: nn.Module = self.model.get_submodule(path.format(change.layer))
        return module


def _active(when: When, step: int) -> bool:
    if when in ("prefill", "all"):
        return when == "all" or step == 0
    return step in when
