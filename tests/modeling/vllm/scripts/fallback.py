"""Traces a model that vLLM runs through transformers' own code.

In a process of its own: vLLM changes the classes of that code where it does so.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from typing import Any

from midstream import VLLM
from midstream.modeling.vllm import bootstrap
from tests.modeling.vllm.scripts.reporting import TINY, reported
from tests.support.changes import zero_mlp
from tests.support.checkpoints import A, B, checkpoint
from tests.support.compare import relative_error
from tests.support.oracle import Oracle

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PATH = checkpoint("T-LLAMA", with_tokenizer=True)


def main() -> None:
    bootstrap.prepare_process(bootstrap.installed())
    oracle = Oracle(PATH)  # before vLLM has changed the class
    streams = [oracle.reads(prompt) for prompt in (A, B)]
    edited = oracle.generate(A, 4, changes=[zero_mlp(1)], when="prefill").tokens
    clean = [oracle.generate(prompt, 4).tokens for prompt in (A, B)]
    model = VLLM(str(PATH), model_impl="transformers", **TINY)
    with reported("traced") as facts:
        with model.trace(max_tokens=4, **GREEDY) as tracer:
            shapes = [].save()
            for prompt in (A, B):
                with tracer.invoke(prompt):
                    stream = model.model.layers[1].output
                    shapes.append([list(stream.shape)])
                    for _ in tracer.iter[1:4]:
                        shapes[-1].append(list(model.model.layers[1].output.shape))
                    stream.save()
        facts["shapes"] = shapes
        facts["errors"] = [
            relative_error(got[0], right["residual.1"])
            for got, right in zip(stream, streams, strict=True)
        ]
        facts["tokens_are_right"] = [tokens(each) for each in tracer.result] == clean
    with reported("edited") as facts:
        with model.trace(max_tokens=4, **GREEDY) as tracer:
            with tracer.invoke(A):
                model.model.layers[1].mlp.output[:, :] = 0
            with tracer.invoke(B):
                rows = model.model.layers[1].mlp.output
                model.model.layers[1].mlp.output = rows.clone()
        facts["tokens"] = [tokens(each) for each in tracer.result]
        facts["right"], facts["clean"] = [edited, clean[1]], clean


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
