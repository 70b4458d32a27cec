"""Requests on the tiny engine: through traces, and by hooks on a plain model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream.errors import InterventionError, OutOfOrderError
from tests.fuzz.dialects import Lines, Midstream, indented
from tests.fuzz.grammar import Statement, render
from tests.fuzz.hooked import Hooked
from tests.fuzz.mirror import Mirror
from tests.fuzz.programs import VARIABLES, Outcome, module, predicted_block

VECTOR = torch.linspace(-1.0, 1.0, 128)
SETTINGS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Request:
    """A request on the engine: its prompt, how many tokens it asks for, and its block."""

    prompt: tuple[int, ...]
    steps: int
    body: tuple[Statement, ...]

    def names(self, index: int) -> dict[str, Any]:
        """What the block finds outside itself."""
        generator = torch.Generator().manual_seed(200 + index)
        x = torch.randn(len(self.prompt), 128, generator=generator)
        return {"X": x, "V": VECTOR, "Z": torch.zeros_like(x)}


@dataclass
class Predicted(Outcome):
    """What hooks say: also the tokens, and whether a token was decided by the last bits.

    Attributes:
        cut: whether the request ends before its last step.
    """

    tokens: list[int] = field(default_factory=list)
    close_call: bool = False
    cut: bool = False


@dataclass
class Traced:
    """What a trace gave: values by name, the error's text, and each request's result."""

    saves: dict[str, Any]
    error: str | None
    results: list[Any]

    def kept(self, index: int) -> dict[str, Any]:
        """A request's saved values by their names in its block."""
        ending = f"_{index}"
        found = {n.removesuffix(ending): v for n, v in self.saves.items() if n.endswith(ending)}
        return {n: v for n, v in found.items() if n not in "XVZ"}  # other names of saved values


def _block(request: Request, index: int) -> Lines:
    say = Midstream(f"{{0}}_{index} = ({{1}}).save()")
    return [
        f"X, V, Z = X_{index}, V_{index}, Z_{index}",
        "caught = []",
        f"caught_{index} = caught.save()",
        *VARIABLES,
        *render(request.body, say),
    ]


def _function(request: Request) -> Lines:
    """As a function, whose return value comes home."""
    lines = ["X, V, Z = X_0, V_0, Z_0", "caught = []", "kept = {'caught_0': caught}", *VARIABLES]
    lines += [*render(request.body, Midstream("kept['{0}_0'] = {1}")), "return kept"]
    return ["def block(model, tracer):", *indented(lines)]


def source(requests: Sequence[Request], form: str) -> Lines:
    """The trace as a user writes it: one request in a `with` or a function, or several invokes."""
    opened = "model.trace(PROMPTS[0], max_tokens=STEPS[0], {}**SETTINGS)"
    if form == "function":
        return [*_function(requests[0]), f"tracer = {opened.format('block=block, ')}"]
    if form == "with":
        lines = _block(requests[0], 0)
        return [f"tracer = {opened.format('')}", "with tracer:", *indented(lines)]
    lines = []
    for i, request in enumerate(requests):
        lines.append(f"with tracer.invoke(PROMPTS[{i}], max_tokens=STEPS[{i}]):")
        lines += indented(_block(request, i))
    return ["tracer = model.trace(**SETTINGS)", "with tracer:", *indented(lines)]


def trace(model: Any, requests: Sequence[Request], form: str) -> Traced:
    """Run the requests in one trace."""
    names: dict[str, Any] = {"model": model, "torch": torch, "OutOfOrderError": OutOfOrderError}
    names |= {"PROMPTS": [list(r.prompt) for r in requests], "STEPS": [r.steps for r in requests]}
    names["SETTINGS"] = SETTINGS
    for i, request in enumerate(requests):
        names |= {f"{name}_{i}": value for name, value in request.names(i).items()}
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loops that outlast their request
        try:
            module(source(requests, form), names)
        except InterventionError as raised:
            error = str(raised)
    tracer = names.get("tracer")
    if tracer is None:  # a function's error is all there is
        return Traced({}, error, [])
    results = tracer.result if isinstance(tracer.result, list) else [tracer.result]
    return Traced(tracer.saves, error, results)


def predicted(hf: Any, request: Request, index: int) -> Predicted:
    """What hooks on a model of its own say the request must give."""
    outcome, mirror, plain = Predicted(), Mirror(hf), Mirror(hf)
    block = predicted_block(request.body, request.names(index), outcome)
    run = Hooked(mirror, block, lambda path, *args: plain.get_submodule(path)(*args))
    ids = torch.tensor(request.prompt)
    with torch.no_grad():
        for _ in range(request.steps):
            run.begin(len(ids))
            logits = mirror.step(ids) @ mirror.head.T
            for place in (("logits_processor", "output"), ("", "logits")):
                logits = run.reach(place, logits, 1)
            best = logits[0].topk(2)
            gap, size = float(best.values.diff().abs()), float(logits.abs().max())
            outcome.close_call |= not gap > 1e-3 * max(1.0, size)
            ids = run.reach(("", "samples"), logits.argmax(-1, keepdim=True), 1)[0]
            run.end()
            if run.stopped is not None and not run.stopped:
                break
            outcome.tokens.append(int(ids))
            if run.error is not None or run.stopped:
                break
        run.close()
    outcome.error = None if run.error is None else type(run.error).__name__
    outcome.stopped = run.stopped
    outcome.cut = len(outcome.tokens) < request.steps
    return outcome


def compare(got: Traced, right: Sequence[Predicted]) -> str | None:
    """What differs; None if nothing does."""
    errors = [p.error for p in right if p.error is not None]
    if (got.error is None) != (not errors):
        return f"error: got {got.error}, expected {errors}"
    if got.error is not None:
        count = re.search(r"^(\d+) blocks of this trace failed", got.error, re.M)
        if int(count[1] if count else 1) != len(errors) or not got.error.startswith(
            errors[0] + ":"
        ):
            return f"errors: got {got.error}, expected {errors}"
    for i, outcome in enumerate(right if got.results else ()):
        found = _compare_one(got, i, outcome)
        if found:
            return f"request {i}: {found}"
    return None


def _compare_one(got: Traced, index: int, right: Predicted) -> str | None:
    kept, completion = got.kept(index), got.results[index].outputs[0]
    if not kept and right.stopped is not None:  # a function that was stopped returned nothing
        return None
    caught = kept.pop("caught", None)
    if caught != right.caught:
        return f"caught {caught}, expected {right.caught}"
    if right.cut and right.error is not None and completion.finish_reason != "error":
        return f"ended by {completion.finish_reason}, expected error {right.error}"
    if right.cut and right.stopped is not None and completion.stop_reason != "tracer.stop":
        return f"stopped by {completion.stop_reason}, expected {right.stopped}"
    if kept.keys() != right.kept.keys():
        return f"saved {sorted(kept)}, expected {sorted(right.kept)}"
    for name, value in right.kept.items():
        if not close(kept[name], value):
            return f"{name}: got {kept[name]}, expected {value}"
    tokens = list(completion.token_ids)
    if right.error is None and tokens != right.tokens:
        return f"tokens {tokens}, expected {right.tokens}"
    return None


def close(got: Any, right: Any) -> bool:
    """Whether two saved values are the same, but for what kernels may round differently."""
    if not isinstance(right, torch.Tensor):
        return type(got) is type(right) and (right is None or got == right)
    if not isinstance(got, torch.Tensor) or got.shape != right.shape:
        return False
    if not right.is_floating_point():
        return torch.equal(got.long(), right.long())
    scale = max(1.0, float(right.detach().abs().max())) if right.numel() else 1.0
    return got.dtype == right.dtype and torch.allclose(
        got, right, rtol=0, atol=3e-4 * scale, equal_nan=True
    )
