"""Read, lens and edit a real small model while vLLM serves it.

Run it with ``make demo``, or ``python examples/quickstart.py [PICTURE.png]`` where midstream is
installed with an engine. It runs on a CPU and on a GPU alike.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from midstream import VLLM
from midstream.demo import demo_model

PROMPT = "The capital of France is"
ZEROED = 11  # layer whose MLP the edit switches off
console = Console(highlight=False)
START = time.perf_counter()


def step(text: str) -> None:
    """Say what happens next, with the seconds since the start."""
    console.print(f"[dim]{time.perf_counter() - START:6.1f} s  {escape(text)}[/dim]")


def next_token(model: VLLM, logits: torch.Tensor) -> tuple[str, float]:
    """Return the likeliest next token and its probability; logits are [1, vocabulary]."""
    probability, token = logits[-1].float().softmax(-1).max(-1)
    return model.tokenizer.decode(int(token)), float(probability)


def read(model: VLLM) -> torch.Tensor:
    """Logits after the prompt, [1, vocabulary]."""
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        logits = model.logits.save()
    return logits


def lens(model: VLLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit lens: what each layer's residual stream says at each position.

    Returns the likeliest token's id and its probability, both [layers, positions].
    """
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        ids, chances = [], []
        for layer in model.model.layers:
            stream = sum(layer.output)  # the residual stream, [positions, width]
            scores = model.logits_processor(model.lm_head, model.model.norm(stream))
            best = scores.float().softmax(-1).max(-1)
            ids.append(best.indices)
            chances.append(best.values)
        top = torch.stack(ids).save()
        probability = torch.stack(chances).save()
    return top, probability


def edit(model: VLLM) -> torch.Tensor:
    """Logits after the prompt with one layer's MLP switched off, [1, vocabulary]."""
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        model.model.layers[ZEROED].mlp.output[:] = 0
        logits = model.logits.save()
    return logits


def lens_table(tokens: list[list[str]], probability: torch.Tensor) -> Table:
    """Lay out the lens at the last position, a row a layer."""
    table = Table("layer", "top token", "probability", title=f"Logit lens after {PROMPT!r}")
    for layer, row in enumerate(tokens):
        table.add_row(str(layer), escape(repr(row[-1])), f"{float(probability[layer, -1]):.3f}")
    return table


def heat_map(
    tokens: list[list[str]], probability: torch.Tensor, prompt: list[str], path: Path
) -> None:
    """Draw the lens over layers (upwards) and positions (to the right) as a picture.

    Args:
        tokens: top token of each cell, [layers][positions].
        probability: its probability, [layers, positions].
        prompt: the prompt's tokens, one a position.
        path: the PNG file to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # draws into a file, also where there is no screen
    from matplotlib import pyplot as plt

    layers, positions = probability.shape
    figure, axes = plt.subplots(
        figsize=(2.0 + 1.3 * positions, 1.4 + 0.28 * layers), layout="constrained"
    )
    cells = probability.float().numpy()
    image = axes.imshow(cells, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
    for layer in range(layers):
        for position in range(positions):
            # dark text on the bright end of the scale
            colour = "black" if probability[layer, position] > 0.5 else "white"
            text = _visible(tokens[layer][position])
            axes.text(position, layer, text, ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(positions), [_visible(token) for token in prompt])
    axes.set_yticks(range(0, layers, max(1, layers // 30)))
    axes.set_xlabel("prompt token (the lens shows the token predicted after it)")
    axes.set_ylabel("layer")
    axes.set_title("Logit lens: top token of each layer's residual stream")
    figure.colorbar(image, ax=axes, label="probability of the top token")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _visible(token: str) -> str:
    # a leading space is part of a token, and `$` would start a formula
    return token.replace(" ", "␣").replace("\n", "↵").replace("$", r"\$")


def main(picture: Path) -> None:
    """Run all four parts and print what they show."""
    step("Preparing the demo model, SmolLM2-135M-Instruct")
    path = demo_model(progress=step)
    step("Building the engine; on a CPU this takes about half a minute")
    # fp32, so that a CPU and a GPU print the same digits
    # a cache of this size is plenty for one prompt, and leaves memory to other programs
    cache = 1 << 29
    with VLLM(
        str(path), dispatch=True, dtype="float32", max_model_len=512, kv_cache_memory_bytes=cache
    ) as model:
        step("Tracing the prompt")
        token, before = next_token(model, read(model))
        console.print(f"\n{PROMPT!r} -> {token!r}, probability {before:.3f}\n", markup=False)

        step("Reading every layer through the logit lens")
        ids, probability = lens(model)
        tokens = [[model.tokenizer.decode(int(i)) for i in row] for row in ids]
        console.print(lens_table(tokens, probability))

        step(f"Running the prompt again with the MLP of layer {ZEROED} switched off")
        logits = edit(model)
        other, after = next_token(model, logits)
        wanted = model.tokenizer.encode(token, add_special_tokens=False)[0]
        left = float(logits[-1].float().softmax(-1)[wanted])
        console.print(
            f"\nMLP of layer {ZEROED} zeroed: {PROMPT!r} -> {other!r}, probability {after:.3f}; "
            f"{token!r} falls from {before:.3f} to {left:.3f}\n",
            markup=False,
        )

        prompt = [model.tokenizer.decode(int(i)) for i in model.tokenizer.encode(PROMPT)]
        heat_map(tokens, probability, prompt, picture)
        step(f"Wrote the lens over all layers and positions to {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lens.png"))
