"""Several invokes in one forward: each row is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from midstream.errors import PromptError, UnsupportedError
from midstream.modeling.transformers.inputs import Inputs
from midstream.modeling.transformers.signature import signature_of
from tests.modeling.transformers.test_inputs import OTHER, TEXT, logits, one
from tests.support.checkpoints import A, B, C

Get = Callable[[str], Any]
DECODERS = ("T-GPT2", "T-LLAMA", "T-GEMMA2", "T-BLOOM")
TOLERANCE = 1e-5


def together(model: Inputs, *given: Any, **more: Any) -> Any:
    """One forward's input for several invokes."""
    return model.prepare([model.encode(each) for each in given], **more)


def alone(module: Any, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt that runs alone, ``[T, vocabulary]``."""
    return logits(module, input_ids=torch.tensor([ids]))[0]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((one - other).abs().max() / other.abs().max())


def padded_right(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """The known wrong batch of a decoder."""
    longest = max(map(len, prompts))
    rows = [[*prompt, *[3] * (longest - len(prompt))] for prompt in prompts]
    mask = [[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


# --- decoders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_padded_on_the_left(name: str, inputs: Get) -> None:
    """Each invoke's tokens are what they are alone, its last at the last place (H14, case 56)."""
    module, model = inputs(name)
    prompts = [A, B, C]
    prepared = together(model, *prompts)
    assert prepared.spans == ((0, 1), (1, 2), (2, 3))
    assert (prepared.lengths, prepared.side) == ((5, 3, 9), "left")
    found = logits(module, **prepared.arguments)
    wrong = logits(module, **padded_right(prompts))
    for row, prompt in enumerate(prompts):
        right = alone(module, prompt)
        assert distance(found[row, -len(prompt) :], right) < TOLERANCE
        if len(prompt) < len(C):
            assert distance(wrong[row, -1], right[-1]) > 10 * TOLERANCE


def test_positions_are_counted_over_real_tokens(inputs: Get) -> None:
    """Learned positions of a padded row start at its first token (H14)."""
    module, model = inputs("T-GPT2")
    arguments = together(model, A, B).arguments
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
    right = alone(module, B)[-1]
    assert distance(logits(module, **arguments)[1, -1], right) < TOLERANCE
    arguments.pop("position_ids")
    assert distance(logits(module, **arguments)[1, -1], right) > 10 * TOLERANCE


def test_positions_are_left_to_models_that_count_their_own(inputs: Get) -> None:
    """No position ids where the forward takes none, or where a position is several (H14)."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    with torch.device("meta"):
        module = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(
                text_config={**text, "num_key_value_heads": 2, "intermediate_size": 32},
                vision_config={"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "depth": 1},
            )
        )
    assert "position_ids" in signature_of(module).names
    assert not signature_of(module).positions
    assert "position_ids" not in together(inputs("T-BLOOM")[1], A, B).arguments
    assert "position_ids" in together(inputs("T-LLAVA")[1], A, B).arguments


@pytest.mark.parametrize("name", ["T-GPT2", "T-LLAMA"])
def test_a_list_of_texts_is_padded_like_invokes(name: str, inputs: Get) -> None:
    """Several prompts of one invoke are one span of the same rows (H13, H14)."""
    _, model = inputs(name)
    apart = together(model, TEXT, OTHER)
    whole = one(model, [TEXT, OTHER])
    assert (whole.spans, whole.lengths) == (((0, 2),), (5, 3))
    assert whole.arguments.keys() == apart.arguments.keys()
    for key, tensor in whole.arguments.items():
        assert torch.equal(tensor, apart.arguments[key])
    mixed = together(model, [TEXT, OTHER], C)
    assert (mixed.spans, mixed.lengths, mixed.rows) == (((0, 2), (2, 3)), (5, 3, 9), 3)


def test_rows_of_one_length_need_no_padding(inputs: Get) -> None:
    """Invokes of the same length are stacked, and nothing is added to their ids (H14)."""
    module, model = inputs("T-GPT2")
    prepared = together(model, A, [21, 22, 23, 24, 25])
    assert list(prepared.arguments) == ["input_ids"]
    assert distance(logits(module, **prepared.arguments)[0], alone(module, A)) < TOLERANCE


def test_the_padding_that_a_user_gives_is_kept(inputs: Get) -> None:
    """A mask with padding on the left counts, alone and beside others (H14, case 29)."""
    module, model = inputs("T-GPT2")
    given = {"input_ids": [[9, 9, *B], A], "attention_mask": [[0, 0, 1, 1, 1], [1] * 5]}
    right = alone(module, B)
    plain = {name: torch.tensor(value) for name, value in given.items()}
    assert distance(logits(module, **plain)[0, -1], right[-1]) > 10 * TOLERANCE
    for prepared in (one(model, given), together(model, given, C)):
        assert prepared.lengths[:2] == (3, 5)
        found = logits(module, **prepared.arguments)[0, -len(B) :]
        assert distance(found, right) < TOLERANCE
    right_padded = {"input_ids": [[*B, 9, 9]], "attention_mask": [[1, 1, 1, 0, 0]]}
    assert "position_ids" not in one(model, right_padded).arguments


def test_lists_of_a_tokenizer_without_padding(inputs: Get, local: Get) -> None:
    """A tokenizer's output whose rows differ in length is padded (H13)."""
    _, model = inputs("T-LLAMA")
    given = local("T-LLAMA").tokenizer([TEXT, OTHER])
    prepared = one(model, given)
    assert prepared.lengths == (5, 3)
    assert torch.equal(
        prepared.arguments["input_ids"][1], one(model, [TEXT, OTHER]).arguments["input_ids"][1]
    )


def test_generation_of_a_batch_is_that_of_each_prompt(inputs: Get) -> None:
    """`generate` gets the mask and counts positions itself (H14, case 63)."""
    module, model = inputs("T-GPT2")
    greedy = {"max_new_tokens": 6, "do_sample": False}
    prepared = together(model, A, B, generate=True)
    assert sorted(prepared.arguments) == ["attention_mask", "input_ids"]
    found = module.generate(**prepared.arguments, **greedy)[:, -6:].tolist()
    wrong = module.generate(input_ids=prepared.arguments["input_ids"], **greedy)[1, -6:].tolist()
    solo = [
        module.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), **greedy
        )[0, -6:].tolist()
        for ids in (A, B)
    ]
    assert found == solo
    assert wrong != solo[1]


def test_padding_ids_in_a_prompt_count_in_generation(inputs: Get) -> None:
    """Ids that a user gives are all real, the padding token among them (case 63)."""
    _, model = inputs("T-T5")
    prepared = model.prepare([model.encode([3, *A])], generate=True)
    assert prepared.arguments["attention_mask"].tolist() == [[1] * 6]
    assert prepared.lengths == (6,)


# --- encoders, and decoders beside them ----------------------------------------------------------


def test_encoders_are_padded_on_the_right(inputs: Get) -> None:
    """An encoder's rows keep their places, and padding changes nothing of them (H14)."""
    module, model = inputs("T-BERT")
    prepared = together(model, A, B)
    assert prepared.side == "right"
    assert prepared.arguments["input_ids"][1].tolist() == [*B, 3, 3]
    assert "position_ids" not in prepared.arguments
    right = alone(module, B)
    assert distance(logits(module, **prepared.arguments)[1, :3], right) < TOLERANCE
    unmasked = logits(module, input_ids=prepared.arguments["input_ids"])
    assert distance(unmasked[1, :3], right) > 10 * TOLERANCE


def test_both_sides_of_an_encoder_decoder_are_padded_on_the_right(inputs: Get) -> None:
    """Encoder and decoder rows of other lengths are what they are alone (H14)."""
    module, model = inputs("T-T5")
    given = [
        {"input_ids": [A], "decoder_input_ids": [[3, 40]]},
        {"input_ids": [B], "decoder_input_ids": [[3, 41, 42]]},
    ]
    prepared = together(model, *given)
    found = logits(module, **prepared.arguments)
    assert prepared.arguments["decoder_input_ids"][0].tolist() == [3, 40, 3]
    for row, each in enumerate(given):
        arguments = {name: torch.tensor(value) for name, value in each.items()}
        right = logits(module, **arguments)[0]
        assert distance(found[row, : len(right)], right) < TOLERANCE
    unmasked = {k: v for k, v in prepared.arguments.items() if k != "attention_mask"}
    assert distance(logits(module, **unmasked)[1], found[1]) > 10 * TOLERANCE


def test_labels_are_padded_with_what_no_loss_sees(inputs: Get) -> None:
    """Labels of other lengths get -100, and padding predicts none of them (H14)."""
    module, model = inputs("T-LLAMA")
    given = [{"input_ids": [ids], "labels": [ids]} for ids in (A, B)]
    prepared = together(model, *given)
    assert prepared.arguments["labels"].tolist() == [A, [-100, -100, -100, *B[1:]]]
    with torch.no_grad():
        loss = module(**prepared.arguments).loss
        apart = [module(input_ids=torch.tensor([i]), labels=torch.tensor([i])).loss for i in (A, B)]
    assert distance(loss, (4 * apart[0] + 2 * apart[1]) / 6) < TOLERANCE  # by tokens that have one
    _, targets = inputs("T-T5")
    made = one(targets, text=[TEXT, OTHER], text_target=["t30", "t31 t32"]).arguments
    assert made["labels"].tolist() == [[30, -100], [31, 32]]


def test_an_encoder_that_can_decode_is_an_encoder_until_told() -> None:
    """A model with a cache is padded as an encoder where its configuration says it is one (H14)."""
    from transformers import BertConfig, BertLMHeadModel, BertModel

    for kind in (BertModel, BertLMHeadModel):
        for is_decoder in (False, True):
            config = BertConfig(num_hidden_layers=1, hidden_size=24, is_decoder=is_decoder)
            with torch.device("meta"):
                signature = signature_of(kind(config))
            assert "past_key_values" in signature.names
            assert signature.side == ("left" if is_decoder else "right")


def test_segments_are_padded(inputs: Get) -> None:
    """Token types of an encoder are padded with 0, and are 0 where an invoke has none (H14)."""
    module, model = inputs("T-BERT")
    given = {"input_ids": [A], "token_type_ids": [[0, 0, 1, 1, 1]]}
    prepared = together(model, given, B)
    assert prepared.arguments["token_type_ids"].tolist() == [[0, 0, 1, 1, 1], [0] * 5]
    right = logits(module, **{name: torch.tensor(value) for name, value in given.items()})
    assert distance(logits(module, **prepared.arguments)[0], right[0]) < TOLERANCE
    assert distance(alone(module, A), right[0]) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["T-BERT-CLASSES", "T-LLAMA-CLASSES"])
def test_sequences_are_classified_as_alone(name: str, inputs: Get) -> None:
    """Each row's classes are those of its prompt alone, labels are one for each row (H14)."""
    module, model = inputs(name)
    given = [{"input_ids": [A], "labels": [0]}, {"input_ids": [B], "labels": [2]}]
    prepared = together(model, *given)
    assert prepared.arguments["labels"].tolist() == [0, 2]
    found = logits(module, **prepared.arguments)
    for row, ids in enumerate((A, B)):
        right = logits(module, input_ids=torch.tensor([ids]))[0]
        assert distance(found[row], right) < TOLERANCE
        assert distance(found[1 - row], right) > 10 * TOLERANCE


# --- what cannot share a forward -----------------------------------------------------------------


def test_images_of_one_size_share_a_forward(inputs: Get) -> None:
    """Pixel values of one shape are stacked; other shapes are refused with the loop (H18)."""
    _, model = inputs("T-VIT")
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    prepared = together(model, pixels[:1], pixels[1:])
    assert prepared.spans == ((0, 1), (1, 2))
    assert torch.equal(prepared.arguments["pixel_values"], pixels)
    with pytest.raises(UnsupportedError, match=r"pixel_values of the shapes .*one by one"):
        together(model, pixels[:1], pixels[1:, :, :8])


def test_images_with_text_run_alone(inputs: Get) -> None:
    """Text with images does not share a forward; text beside text does (H18)."""
    _, model = inputs("T-LLAVA")
    both = {"input_ids": [[5, *[128] * 16]], "pixel_values": torch.zeros(1, 3, 16, 16)}
    assert one(model, both).rows == 1
    message = r"(?s)text with pixel_values\. Trace them one by one:\n.*with model.trace\(each\)"
    with pytest.raises(NotImplementedError, match=message):
        together(model, both, A)


def test_sound_runs_alone(inputs: Get) -> None:
    """Raw features do not share a forward (H18)."""
    _, model = inputs("T-WHISPER")
    given = {"input_features": torch.zeros(1, 8, 100), "decoder_input_ids": [[5]]}
    with pytest.raises(UnsupportedError, match="cannot share one forward: audio features"):
        together(model, given, given)


def test_flags_must_agree(inputs: Get) -> None:
    """A keyword for all rows is the same in all invokes, or refused with both values (H18)."""
    _, model = inputs("T-LLAMA")
    encodings = [model.encode(A, use_cache=False), model.encode(B, use_cache=False)]
    assert model.prepare(encodings).arguments["use_cache"] is False
    with pytest.raises(UnsupportedError, match="use_cache=None in one invoke and False in another"):
        model.prepare([*encodings, model.encode(C)])


def test_a_state_of_its_own_runs_alone(inputs: Get) -> None:
    """An invoke with keys and values of its own does not share a forward (H18)."""
    module, model = inputs("T-LLAMA")
    with torch.no_grad():
        past = module(input_ids=torch.tensor([A])).past_key_values
    assert one(model, [40], past_key_values=past).arguments["past_key_values"] is past
    encodings = [model.encode([40], past_key_values=past), model.encode(B)]
    with pytest.raises(UnsupportedError, match="an input with past_key_values of its own"):
        model.prepare(encodings)


def test_what_some_invokes_lack_is_asked_for(inputs: Get) -> None:
    """Decoder ids for one invoke and none for another are told by name (H18)."""
    _, model = inputs("T-T5")
    with pytest.raises(PromptError, match="decoder_input_ids is given for some of the invokes"):
        together(model, {"input_ids": [A], "decoder_input_ids": [[3]]}, B)


def test_nothing_to_run_is_told() -> None:
    """A forward without any invoke is refused (G25)."""
    from midstream.modeling.transformers.loading import Checkpoint

    module = torch.nn.Linear(2, 2)
    with pytest.raises(PromptError, match="There is no input"):
        Inputs(module, Checkpoint(module)).prepare([])
