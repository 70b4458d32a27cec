"""Where does the answer come from? Patching, and its estimate from one gradient, side by side.

Run it with ``python examples/attribution.py [PICTURE.png]`` where midstream is installed with
transformers; no engine and no GPU are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from midstream import TransformersModel
from midstream.demo import demo_model

CLEAN, CORRUPTED = "The capital of France is", "The capital of Japan is"
ANSWERS = (" Paris", " Tokyo")


def attribution(model: TransformersModel, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimated effect of each patch, and the clean streams to patch in.

    Returns:
        ``[layers, tokens]``, and ``[layers, tokens, width]``.
    """
    layers = model.model.layers
    with model.trace(CLEAN):
        clean = torch.cat([layer.output for layer in layers]).detach().save()
    with model.trace(CORRUPTED):
        streams = [layer.output for layer in layers]
        metric = model.logits[0, ids[0]] - model.logits[0, ids[1]]
        with metric.backward():
            gradients = torch.cat([stream.grad for stream in reversed(streams)]).flip(0).save()
        corrupted = torch.cat(streams).detach().save()
    return ((clean - corrupted) * gradients).sum(-1), clean


def patching(
    model: TransformersModel, ids: list[int], clean: torch.Tensor, layers: Sequence[int]
) -> torch.Tensor:
    """The true effect of each patch on the difference of the answers' logits, [layers, tokens]."""
    tokens = clean.shape[1]
    effect = torch.zeros(len(layers), tokens)
    with torch.no_grad():
        for row, layer in enumerate(layers):
            with model.trace() as tracer:
                with tracer.invoke(CORRUPTED):
                    answers = model.logits[0, ids].save()
                for token in range(tokens):
                    with tracer.invoke(CORRUPTED):
                        model.model.layers[layer].output[0, token] = clean[layer, token]
                        answers = model.logits[0, ids].save()
            differences = torch.stack(answers) @ torch.tensor([1.0, -1.0])
            effect[row] = differences[1:] - differences[0]
    return effect


def draw(panels: dict[str, torch.Tensor], tokens: list[str], path: Path) -> None:
    """Draw maps of layers (upwards) and tokens (to the right) beside each other."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws into a file, also where there is no screen
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(9, 5), layout="constrained", sharey=True)
    most = max(float(panel.abs().max()) for panel in panels.values())
    for one, (title, panel) in zip(axes, panels.items(), strict=True):
        image = one.imshow(
            panel.numpy(), origin="lower", aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most
        )
        one.set_xticks(range(len(tokens)), tokens, rotation=30)
        one.set_title(title)
        one.set_xlabel("token whose stream is taken from the clean run")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="change of logit(Paris) - logit(Tokyo)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(picture: Path) -> None:
    """Compute both maps, draw them and print how well they agree."""
    model = TransformersModel(demo_model(), dtype=torch.float32)
    ids = [model.tokenizer(answer)["input_ids"][0] for answer in ANSWERS]
    estimated, clean = attribution(model, ids)
    true = patching(model, ids, clean, range(len(clean)))
    tokens = [model.tokenizer.decode(token) for token in model.tokenizer(CORRUPTED)["input_ids"]]
    draw({"estimated from one gradient": estimated, "patched": true}, tokens, picture)
    agreement = torch.corrcoef(torch.stack([estimated.flatten(), true.flatten()]))[0, 1]
    print(f"{true.numel()} patches; their estimates correlate with them at {agreement:.2f}")
    print(f"Wrote {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "attribution.png"))
