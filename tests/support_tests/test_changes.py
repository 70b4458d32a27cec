"""The oracle's changes do what the edits of a block are documented to do."""

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import CHECKPOINTS, EOS, A, C, checkpoint
from tests.support.oracle import (
    Oracle,
    add_vector,
    assert_close,
    edit_layer,
    edit_logits,
    edit_mlp_input,
    edit_module,
    relative_error,
    replace_layer,
    scale_layer,
    zero_mlp,
)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return Oracle(checkpoint(request.param))


@pytest.fixture
def vector() -> Tensor:
    return torch.randn(128, generator=torch.Generator().manual_seed(1)) * 5


def _unembed(oracle: Oracle, stream: Tensor) -> Tensor:
    """Apply final norm and head to the last row of a stream, giving [1, vocab]."""
    norm = oracle.model.get_submodule(oracle.architecture.roles["norm"])
    with torch.no_grad():
        logits: Tensor = oracle.model.lm_head(norm(stream[-1:]))
    return logits


def test_no_change_gives_the_logits_of_the_reads(oracle: Oracle) -> None:
    """A run without changes ends with the logits and the likeliest token of the reads."""
    logits = oracle.reads(A)["logits"]
    result = oracle.run(A)
    assert_close(result.logits, logits, wrong=oracle.run(C).logits)
    assert result.tokens == [int(logits.argmax())]


def test_zero_mlp_in_the_last_layer(oracle: Oracle) -> None:
    """With the last MLP zeroed the logits are those of the stream before it."""
    reads = oracle.reads(A)
    last = f"{oracle.architecture.layer_path(3, 'mlp')}.output"
    right = _unembed(oracle, reads["residual.3"] - reads[last])
    assert_close(oracle.run(A, [zero_mlp(3)]).logits, right, wrong=oracle.run(A).logits)


def test_stream_edits_are_replacements(oracle: Oracle, vector: Tensor) -> None:
    """Scaling and adding equal replacing the stream by the scaled and the added one."""
    stream = oracle.reads(A)["residual.1"]
    clean = oracle.run(A).logits
    assert_close(oracle.run(A, [replace_layer(1, stream)]).logits, clean, wrong=clean.roll(1))
    added = stream.clone()
    added[[1, 4]] += vector
    for change, new in [
        (scale_layer(1, 3.0), stream * 3),
        (add_vector(1, vector), stream + vector),
        (add_vector(1, vector, positions=[1, 4]), added),
        (edit_layer(1, torch.neg), -stream),
    ]:
        right = oracle.run(A, [replace_layer(1, new)]).logits
        assert_close(oracle.run(A, [change]).logits, right, wrong=clean)


def test_replacement_in_the_last_layer_reaches_the_head(oracle: Oracle, vector: Tensor) -> None:
    """A stream written at the last layer is what the head sees."""
    stream = vector.repeat(len(A), 1)
    right = _unembed(oracle, stream)
    assert_close(
        oracle.run(A, [replace_layer(3, stream)]).logits, right, wrong=oracle.run(A).logits
    )


def test_mlp_input_edit_leaves_the_stream_alone(oracle: Oracle) -> None:
    """An edited MLP input changes what the MLP adds, not the stream it is added to."""
    reads = oracle.reads(A)
    path = oracle.architecture.layer_path(3, "mlp")
    mlp = oracle.model.get_submodule(path)
    with torch.no_grad():
        new = mlp(reads[f"{path}.input"] * -2)
    right = _unembed(oracle, reads["residual.3"] - reads[f"{path}.output"] + new)
    result = oracle.run(A, [edit_mlp_input(3, lambda rows: rows * -2)])
    assert_close(result.logits, right, wrong=oracle.run(A).logits)


def test_module_edit_takes_a_keyword_input_and_a_tuple_output(oracle: Oracle) -> None:
    """Attention can be edited on both sides, however the model calls it."""
    gpt2 = oracle.model.config.model_type == "gpt2"
    path = oracle.architecture.layer_path(3, "attn" if gpt2 else "self_attn")
    norm = oracle.architecture.layer_path(3, "ln_1" if gpt2 else "input_layernorm")
    clean = oracle.run(A).logits
    at_norm = oracle.run(A, [edit_module(norm, torch.neg)]).logits
    at_input = oracle.run(A, [edit_module(path, torch.neg, site="input")]).logits
    assert_close(at_input, at_norm, wrong=clean)
    zeroed = oracle.run(A, [edit_module(path, torch.zeros_like)]).logits
    doubled = oracle.run(A, [edit_module(path, lambda rows: rows * 2)]).logits
    for one, other in [(zeroed, clean), (doubled, clean), (zeroed, doubled)]:
        assert relative_error(one, other) > 1e-2


def test_logits_edit_is_what_is_sampled(oracle: Oracle) -> None:
    """An edit of the logits, [1, vocab], decides the token and is in the result."""

    def raise_seven(logits: Tensor) -> Tensor:
        assert logits.shape == (1, oracle.model.config.vocab_size)
        logits[0, 7] += 100
        return logits

    result = oracle.run(A, [edit_logits(raise_seven)])
    assert result.tokens == [7]
    assert relative_error(result.logits, oracle.run(A).logits) > 1


def test_changes_leave_no_trace(oracle: Oracle, vector: Tensor) -> None:
    """A run under changes, also one that fails, does not change the next run."""
    clean = oracle.run(A).logits
    oracle.run(A, [add_vector(1, vector), zero_mlp(0), edit_mlp_input(2, torch.neg)])
    with pytest.raises(ValueError, match=r"edit returned \(4, 128\), expected \(5, 128\)"):
        oracle.run(A, [zero_mlp(0), edit_layer(1, lambda rows: rows[1:])])
    assert torch.equal(oracle.run(A).logits, clean)


def test_generate_is_greedy_decoding(oracle: Oracle) -> None:
    """Without changes, tokens are those of the library's own greedy search, logits per step."""
    ids = torch.tensor([A])
    own = oracle.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    result = oracle.generate(A, 8)
    assert result.tokens == own[0, len(A) :].tolist()
    assert result.logits.argmax(-1).tolist() == result.tokens


def test_edit_of_every_step_equals_recomputing(oracle: Oracle, vector: Tensor) -> None:
    """Under ``when="all"`` each step equals a run over all tokens with the edit on all rows."""
    changes = [zero_mlp(1), add_vector(2, vector)]
    result = oracle.generate(A, 5, changes=changes)
    for step in range(5):
        right = oracle.run(A + result.tokens[:step], changes).logits
        clean = oracle.run(A + result.tokens[:step]).logits
        assert_close(result.logits[step : step + 1], right, wrong=clean)


def test_prefill_edit_stays_in_the_cache(oracle: Oracle, vector: Tensor) -> None:
    """A prompt edit acts on later steps through the cache, and new rows are not edited."""
    result = oracle.generate(A, 5, changes=[add_vector(0, vector)], when="prefill")
    on_prompt = add_vector(0, vector, positions=range(len(A)))
    for step in range(1, 5):
        ids = A + result.tokens[:step]
        got, right = result.logits[step : step + 1], oracle.run(ids, [on_prompt]).logits
        assert_close(got, right, wrong=oracle.run(ids).logits)
        assert_close(got, right, wrong=oracle.run(ids, [add_vector(0, vector)]).logits)
    everywhere = oracle.generate(A, 5, changes=[on_prompt], when="all")
    assert_close(everywhere.logits, result.logits, wrong=oracle.generate(A, 5).logits)


def test_edit_of_one_step(oracle: Oracle) -> None:
    """`when` can name steps; the others sample from clean logits."""
    result = oracle.generate(A, 4, changes=[edit_logits(torch.neg)], when={2})
    clean = oracle.generate(A, 4)
    assert result.tokens[:2] == clean.tokens[:2]
    assert_close(result.logits[2], -clean.logits[2], wrong=clean.logits[2])
    assert result.tokens[2] == int(clean.logits[2].argmin())


def test_forced_token_is_continued_from(oracle: Oracle) -> None:
    """A forced token replaces the likeliest one and later steps follow it."""
    result = oracle.generate(A, 4, force={1: 42})
    clean = oracle.generate(A, 4)
    assert result.tokens[:2] == [clean.tokens[0], 42]
    assert torch.equal(result.logits[1], clean.logits[1])
    right = oracle.run([*A, clean.tokens[0], 42]).logits
    assert_close(result.logits[2:3], right, wrong=clean.logits[2:3])


def test_end_token_ends_the_generation(oracle: Oracle) -> None:
    """With `eos` given, its token is kept and nothing follows; without, generation goes on."""
    assert len(oracle.generate(A, 6, force={2: EOS}, eos=EOS).tokens) == 3
    assert len(oracle.generate(A, 6, force={2: EOS}).tokens) == 6
