"""The oracle's reads agree with each other and with arithmetic done here from the weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.checkpoints import CHECKPOINTS, LONG, A
from tests.support.oracle import KINDS, assert_close, relative_error
from tests.support_tests.by_hand import HEAD_DIM, Subject, attend, heads, rotate

ROTARY = ("T-LLAMA", "T-QWEN3")

MODULES = {
    "T-LLAMA": "input_layernorm self_attn self_attn.qkv_proj self_attn.rotary_emb self_attn.attn "
    "self_attn.o_proj post_attention_layernorm mlp mlp.gate_up_proj mlp.act_fn mlp.down_proj",
    "T-GPT2": "ln_1 attn attn.c_attn attn.attn attn.c_proj ln_2 mlp mlp.c_fc mlp.act mlp.c_proj",
}
MODULES["T-QWEN3"] = MODULES["T-LLAMA"] + " self_attn.q_norm self_attn.k_norm"
ENDS = {
    **dict.fromkeys(ROTARY, ("", "model", "model.embed_tokens", "model.norm")),
    "T-GPT2": ("", "transformer", "transformer.wte", "transformer.wpe", "transformer.ln_f"),
}


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
    return {name: Subject(name) for name in CHECKPOINTS}


@pytest.fixture(params=CHECKPOINTS)
def subject(request: pytest.FixtureRequest, subjects: dict[str, Subject]) -> Subject:
    return subjects[request.param]


@pytest.fixture(params=ROTARY)
def rotary(request: pytest.FixtureRequest, subjects: dict[str, Subject]) -> Subject:
    return subjects[request.param]


@pytest.fixture
def gpt2(subjects: dict[str, Subject]) -> Subject:
    return subjects["T-GPT2"]


def test_every_module_is_described(subject: Subject) -> None:
    """The first, a middle and the last layer have input, inputs and output of each module."""
    layers = [
        f"{subject.layer.format(i)}{'.' if module else ''}{module}"
        for i in (0, 2, 3)
        for module in ("", *MODULES[subject.name].split())
    ]
    keys = {f"{p}.{kind}".lstrip(".") for p in (*layers, *ENDS[subject.name]) for kind in KINDS}
    special = {"logits", "logits_processor.output", *(f"residual.{i}" for i in range(4))}
    assert set(subject.reads) == keys | special
    assert not set(subject.oracle.without_counterpart) & set(subject.reads)
    assert set(subject.oracle.reads(A, layers=[1])) & {f"{subject.layer.format(1)}.mlp.output"}


def test_rows_are_the_prompt_tokens(subject: Subject) -> None:
    """Every tensor has one row a prompt token and no batch axis; logits have one row."""
    for key, value in subject.reads.items():
        rows = 1 if "logits" in key else len(A)
        assert {t.shape[0] for t in _tensors(value)} == {rows}, key


def test_input_is_the_first_argument(subject: Subject) -> None:
    """`.input` is the first positional argument, else the first keyword argument."""
    for key, value in subject.reads.items():
        if key.endswith("inputs"):
            args, kwargs = value
            first = [*args, *kwargs.values()][0]
            assert subject.reads[key[:-1]] is first, key


def test_residual_stream_adds_up(subject: Subject) -> None:
    """Entering stream + attention = middle; middle + MLP = leaving = the next layer's entering."""
    norm, attention = ("ln_2", "attn") if subject.name == "T-GPT2" else (
        "post_attention_layernorm", "self_attn")  # fmt: skip
    for i in (2, 3):
        entering = subject.reads[f"residual.{i - 1}"]
        if subject.name == "T-GPT2":
            middle, leaving = subject.at(i, f"{norm}.input"), subject.at(i, "output")
        else:
            middle, leaving = subject.at(i, f"{norm}.output")[1], sum(subject.at(i, "output"))
            assert torch.equal(subject.at(i, "input_layernorm.output")[1], entering)
            assert torch.equal(sum(subject.at(i, "inputs")[0][1:]), entering)
        added = subject.at(i, f"{attention}.output")
        assert_close(entering + added, middle, wrong=entering)
        mlp = subject.at(i, "mlp.output")
        assert_close(middle + mlp, subject.reads[f"residual.{i}"], wrong=middle)
        assert_close(leaving, subject.reads[f"residual.{i}"], wrong=mlp)


def test_pairs_are_what_the_fused_norms_exchange(rotary: Subject) -> None:
    """A norm gets (update, stream) and gives (normed sum, sum); layer 0's first gets one tensor."""
    for i, module in [(2, "input_layernorm"), (2, "post_attention_layernorm"), (3, "")]:
        path = f"{rotary.layer.format(i)}.{module}" if module else "model.norm"
        (update, stream), _ = rotary.reads[path + ".inputs"]
        normed, total = rotary.reads[path + ".output"]
        assert torch.equal(update + stream, total)
        assert_close(normed, rotary.norm(path, total), wrong=rotary.norm(path, update))
    alone = rotary.at(0, "input_layernorm.inputs")
    assert torch.equal(alone[0][0], rotary.reads["model.embed_tokens.output"])
    assert (len(alone[0]), alone[1]) == (1, {})
    assert isinstance(rotary.at(0, "input_layernorm.output"), Tensor)
    assert rotary.at(0, "inputs")[0][2] is None


def test_layer_norms_of_gpt2(gpt2: Subject) -> None:
    """GPT-2's norms give one tensor: the normalised stream, gain and bias applied."""
    for path in ("transformer.h.2.ln_1", "transformer.h.3.ln_2", "transformer.ln_f"):
        right = gpt2.norm(path, gpt2.reads[path + ".input"])
        assert_close(gpt2.reads[path + ".output"], right, wrong=gpt2.reads[path + ".input"])


def test_embeddings_enter_the_first_layer(subject: Subject) -> None:
    """The first layer gets the token embedding, on GPT-2 with the position embedding added."""
    if subject.name == "T-GPT2":
        tokens, positions = (subject.weights[f"transformer.{n}.weight"] for n in ("wte", "wpe"))
        right = tokens[A] + positions[: len(A)]
        assert_close(subject.at(0, "input"), right, wrong=tokens[A])
        assert torch.equal(subject.reads["transformer.wpe.output"], positions[: len(A)])
    else:
        assert torch.equal(
            subject.at(0, "inputs")[0][1], subject.weights["model.embed_tokens.weight"][A]
        )
        assert subject.at(2, "input").tolist() == subject.at(2, "self_attn.input").tolist()
        assert subject.at(2, "input").tolist() == [0, 1, 2, 3, 4]


def test_logits_are_the_head_on_the_last_row(subject: Subject) -> None:
    """Logits are the head's product with the last row of the final norm."""
    tied = subject.name == "T-GPT2"
    head = subject.weights["transformer.wte.weight" if tied else "lm_head.weight"]
    normed = subject.reads["transformer.ln_f.output" if tied else "model.output"]
    logits = normed @ head.T
    assert_close(subject.reads["logits"], logits[-1:], wrong=logits[-2:-1])
    last = subject.reads["residual.3"]
    right = subject.norm("transformer.ln_f" if tied else "model.norm", last)
    assert_close(normed, right, wrong=last)


def test_fused_qkv_and_rotation(rotary: Subject) -> None:
    """q|k|v are the projections in that order; q and k are then (normed and) rotated by halves."""
    for i in (0, 2, 3):
        attention = f"{rotary.layer.format(i)}.self_attn"
        entering = rotary.reads[attention + ".qkv_proj.input"]
        parts = [rotary.linear(f"{attention}.{x}_proj", entering) for x in "qkv"]
        right = torch.cat(parts, dim=-1)
        fused, bias = rotary.reads[attention + ".qkv_proj.output"]
        assert bias is None
        assert_close(fused, right, wrong=torch.cat([parts[0], parts[2], parts[1]], dim=-1))
        q, k, v = parts
        if rotary.name == "T-QWEN3":
            normed = rotary.norm(f"{attention}.q_norm", heads(q))
            assert_close(rotary.reads[attention + ".q_norm.output"], normed, wrong=normed.roll(1))
            q = normed.flatten(1)
            k = rotary.norm(f"{attention}.k_norm", heads(k)).flatten(1)
        assert_close(rotary.reads[attention + ".rotary_emb.inputs"][0][1:], (q, k), wrong=(-q, -k))
        turned = (rotate(q), rotate(k))
        assert_close(rotary.reads[attention + ".rotary_emb.output"], turned, wrong=(q, k))
        assert_close(rotary.reads[attention + ".attn.inputs"][0], (*turned, v), wrong=(q, k, v))


def test_attention_from_its_inputs(subject: Subject) -> None:
    """Causal softmax of the served q and k times v is z; the output projection of z is served."""
    name, attn, proj = ("attn", "attn.attn", "attn.c_proj") if subject.name == "T-GPT2" else (
        "self_attn", "self_attn.attn", "self_attn.o_proj")  # fmt: skip
    for i in (0, 2, 3):
        (q, k, v), _ = subject.at(i, f"{attn}.inputs")
        z = subject.at(i, f"{attn}.output")
        assert_close(z, attend(q, k, v), wrong=attend(q, k, v, causal=False))
        if subject.name != "T-GPT2":
            swapped = k.roll(HEAD_DIM, dims=1), v.roll(HEAD_DIM, dims=1)
            assert_close(z, attend(q, k, v), wrong=attend(q, *swapped))
        projected = subject.linear(f"{subject.layer.format(i)}.{proj}", z)
        out, bias = subject.at(i, f"{proj}.output")
        assert bias is None
        assert_close((out, subject.at(i, f"{name}.output")), (projected,) * 2, wrong=(-out,) * 2)


def test_mlp_from_its_parts(rotary: Subject) -> None:
    """silu(gate) * up of the fused gate|up are the neurons; their down projection is the output."""
    for i in (0, 2, 3):
        mlp = f"{rotary.layer.format(i)}.mlp"
        entering = rotary.reads[mlp + ".input"]
        gate, up = (rotary.linear(f"{mlp}.{x}_proj", entering) for x in ("gate", "up"))
        fused, _ = rotary.reads[mlp + ".gate_up_proj.output"]
        assert_close(fused, torch.cat([gate, up], -1), wrong=torch.cat([up, gate], -1))
        neurons = functional.silu(gate) * up
        wrong = functional.silu(up) * gate
        assert_close(rotary.reads[mlp + ".act_fn.output"], neurons, wrong=wrong)
        down = f"{mlp}.down_proj"
        right = rotary.linear(down, neurons)
        assert_close(rotary.reads[down + ".output"][0], right, wrong=rotary.linear(down, wrong))
        assert torch.equal(rotary.reads[mlp + ".output"], rotary.reads[down + ".output"][0])


def test_mlp_of_gpt2_from_its_parts(gpt2: Subject) -> None:
    """GPT-2's MLP is the tanh form of gelu between two projections with bias."""
    for i in (0, 2, 3):
        mlp = f"transformer.h.{i}.mlp"
        before = gpt2.linear(f"{mlp}.c_fc", gpt2.reads[mlp + ".input"])
        neurons = functional.gelu(before, approximate="tanh")
        assert_close(gpt2.reads[f"{mlp}.c_fc.output"], (before, None), wrong=(neurons, None))
        assert_close(gpt2.reads[f"{mlp}.act.output"], neurons, wrong=functional.relu(before))
        right = gpt2.linear(f"{mlp}.c_proj", neurons)
        assert_close(gpt2.reads[f"{mlp}.output"], right, wrong=-right)


def test_fused_qkv_of_gpt2(gpt2: Subject) -> None:
    """GPT-2's fused projection splits into three equal parts, bias included."""
    attention = "transformer.h.2.attn"
    fused = gpt2.linear(f"{attention}.c_attn", gpt2.reads[f"{attention}.c_attn.input"])
    no_bias = fused - gpt2.weights[f"{attention}.c_attn.bias"]
    assert_close(gpt2.reads[f"{attention}.c_attn.output"], (fused, None), wrong=(no_bias, None))
    served = gpt2.reads[f"{attention}.attn.inputs"][0]
    assert_close(torch.cat(served, -1), fused, wrong=fused.roll(128, dims=1))


def test_layers_and_prompts_differ(subject: Subject) -> None:
    """No location has the value of the same location in another layer or for another prompt."""
    other = subject.oracle.reads([t + 1 for t in A])
    for module in MODULES[subject.name].split():
        middle, last = (subject.at(i, f"{module}.output") for i in (2, 3))
        assert relative_error(last, middle) > 1e-2
        assert relative_error(other[f"{subject.layer.format(3)}.{module}.output"], last) > 1e-2


def test_long_prompt_keeps_rows_in_order(subject: Subject) -> None:
    """The first rows of a long prompt are those of its beginning alone."""
    whole, start = (subject.oracle.reads(LONG[:n])["residual.3"] for n in (300, 64))
    assert_close(whole[:64], start, wrong=whole[1:65])


def test_shared_modules_point_at_their_first_path(subject: Subject) -> None:
    """Modules that are one object for all layers are named with the path of layer 0."""
    module = "mlp.act" if subject.name == "T-GPT2" else "self_attn.rotary_emb"
    first, *others = (f"{subject.layer.format(i)}.{module}" for i in range(4))
    assert subject.oracle.shared == dict.fromkeys(others, first)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value or ()
    return [tensor for part in parts for tensor in _tensors(part)]
