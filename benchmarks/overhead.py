"""What a trace costs beside plain generation, and what each thing in a block costs.

    python benchmarks/overhead.py [--model FOLDER ...] [--repeats N] [--out FILE]
        [--requests N] [--turns N] [--only PART]

Without --model: a tiny random Llama and the demo model. Every ratio is measured in turns in one
run, on one engine with its default settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import throughput
from benchmarks.table import interleaved_us, markdown, median_us, write
from midstream import VLLM
from midstream.tracing import Capture

PROMPT = [11, 12, 13, 14, 15]


class Captured:
    """Captures the body of its `with` statement and does nothing with it."""

    def __enter__(self) -> Captured:
        """Begin the capture."""
        self._capture = Capture.begin(sys._getframe(1), "measured")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        """End it."""
        return self._capture.finish(kind, error) is not None


def capture_rows() -> list[list[str]]:
    """Cold: a `with` statement never seen before. Warm: one seen before."""
    source = (
        "def run(scale, model):\n"
        "    with Captured():\n"
        "        h = model.x.output * scale\n"
        "        h.save()\n"
    )
    import linecache

    def cold() -> None:
        name = f"<cold {len(cold_names)}>"
        cold_names.append(name)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        space: dict[str, Any] = {"Captured": Captured}
        exec(compile(source, name, "exec"), space)
        spaces.append(space)

    cold_names: list[str] = []
    spaces: list[dict[str, Any]] = []
    for _ in range(50):
        cold()
    first = iter(spaces)
    cold_us = median_us(lambda: next(first)["run"](2.0, None), repeats=49)

    def warm() -> None:
        scale, model = 2.0, None
        with Captured():
            h = model.x.output * scale
            h.save()

    return [["cold", f"{cold_us:.0f}"], ["warm", f"{median_us(warm, repeats=2000, warm=50):.1f}"]]


def capture_section() -> str:
    """The table of captures, which need no engine."""
    return markdown("Capturing a block", ["", "µs"], capture_rows())


def single_sections(model: VLLM, name: str, repeats: int) -> list[str]:
    """The tables of one request at a time."""
    header = ["one token", "ms", "ratio", "difference, ms"]
    return [
        markdown(f"{name}: a trace", header, trace_rows(model, repeats)),
        markdown(f"{name}: one more of each", ["", "cost"], piece_rows(model, repeats)),
    ]


def layers(model: VLLM) -> Any:
    """The decoder layers."""
    return model.model.layers


def trace_rows(model: VLLM, repeats: int) -> list[list[str]]:
    """One trace of one token that reads one layer, over plain generation of the same token."""
    from vllm import SamplingParams

    middle = layers(model)[len(layers(model)) // 2]
    plain_settings = SamplingParams(temperature=0.0, max_tokens=1)

    def plain() -> None:
        model.vllm_entrypoint.generate(
            [{"prompt_token_ids": PROMPT}], plain_settings, use_tqdm=False
        )

    def traced() -> None:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            stream = sum(middle.output).save()

    def empty() -> None:
        with model.trace(PROMPT, temperature=0.0, max_tokens=1):
            pass

    base, nothing, read, again = interleaved_us([plain, empty, traced, plain], repeats=repeats)
    base = (base + again) / 2
    return [
        ["plain generate", f"{base / 1e3:.2f}", "1.00", ""],
        [
            "trace, empty block",
            f"{nothing / 1e3:.2f}",
            f"{nothing / base:.3f}",
            f"{(nothing - base) / 1e3:+.2f}",
        ],
        [
            "trace, one layer read",
            f"{read / 1e3:.2f}",
            f"{read / base:.3f}",
            f"{(read - base) / 1e3:+.2f}",
        ],
    ]


def piece_rows(model: VLLM, repeats: int) -> list[list[str]]:
    """The cost of one more of each, from the difference between a block with one and with many."""
    stack = layers(model)
    count = len(stack)
    sizes = {"one": 1, "many": count}

    def block(kind: str, number: int) -> Callable[[], None]:
        def reads() -> None:
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                for layer in stack[:number]:
                    layer.output

        def mlps() -> None:
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                for layer in stack[:number]:
                    layer.mlp.output

        def edits() -> None:
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                for layer in stack[:number]:
                    layer.mlp.output[:] += 0

        return {"pair": reads, "tensor": mlps, "edit": edits}[kind]

    def megabytes(number: int) -> Callable[[], None]:
        def returned() -> None:
            with model.trace(PROMPT, temperature=0.0, max_tokens=1):
                import torch

                values = torch.ones(number, 1 << 18).save()

        return returned

    works = [block(kind, n) for kind in ("tensor", "pair", "edit") for n in sizes.values()]
    works += [megabytes(1), megabytes(65)]
    t = interleaved_us(works, repeats=repeats)
    more = count - 1
    tensor, pair, edit = ((t[i + 1] - t[i]) / more for i in (0, 2, 4))
    return [
        ["read of one more tensor (an MLP's output)", f"{tensor:.1f} µs"],
        ["read of one more pair (a layer's output)", f"{pair:.1f} µs"],
        ["read and edit in place of one more tensor", f"{edit:.1f} µs"],
        ["one more megabyte returned", f"{(t[7] - t[6]) / 64:.0f} µs"],
    ]


def models(given: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Folders to measure, with engine arguments."""
    if given:
        return {Path(path).name: (path, {}) for path in given}
    from midstream.demo import demo_model
    from tests.support.checkpoints import checkpoint

    small = {"dtype": "float32", "max_model_len": 512}
    tiny = str(checkpoint("T-LLAMA", with_tokenizer=True))
    return {
        "tiny Llama (4 layers, width 128)": (tiny, {**small, "block_size": 32}),
        "SmolLM2-135M": (str(demo_model()), small),
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=[], help="checkpoint folders")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--requests", type=int, default=1024, help="invokes in one trace")
    parser.add_argument("--turns", type=int, default=3, help="of the parts with many requests")
    parser.add_argument("--only", choices=["one", "many"], help="requests at a time")
    parser.add_argument("--eager", action="store_true", help="build the engines without graphs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/overhead.md")
    args = parser.parse_args()
    sections = [] if args.only == "many" else [capture_section()]
    for name, (path, settings) in models(args.model).items():
        if args.eager:
            settings["enforce_eager"] = True
        with VLLM(path, dispatch=True, kv_cache_memory_bytes=1 << 28, **settings) as model:
            if args.only != "many":
                sections += single_sections(model, name, args.repeats)
            if args.only != "one":
                sections += throughput.sections(
                    model, name, requests=args.requests, turns=args.turns
                )
        write(args.out, "Overhead of a trace", sections)  # a later model may take an hour


if __name__ == "__main__":
    main()
