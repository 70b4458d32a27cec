"""Every form of an input is the batch that plain transformers makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from midstream.errors import PromptError
from midstream.modeling.transformers.inputs import Inputs
from midstream.modeling.transformers.loading import Checkpoint
from tests.support.checkpoints import A, B
from tests.support.local_checkpoints import IMAGE, word_tokenizer

TEXT = "t11 t12 t13 t14 t15"
OTHER = "t21 t22 t23"

Get = Callable[[str], Any]


def logits(module: Any, **arguments: Any) -> torch.Tensor:
    """What a forward gives, without gradients."""
    with torch.no_grad():
        return module(**arguments).logits


def one(model: Inputs, *given: Any, **keywords: Any) -> Any:
    """The forward's input for one invoke."""
    return model.prepare([model.encode(*given, **keywords)])


# --- text ----------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "text": lambda tokenizer: TEXT,
    "list of one text": lambda tokenizer: [TEXT],
    "ids": lambda tokenizer: A,
    "tuple": lambda tokenizer: tuple(A),
    "range": lambda tokenizer: range(11, 16),
    "rows of ids": lambda tokenizer: [A],
    "tensor": lambda tokenizer: torch.tensor(A),
    "tensor of one row": lambda tokenizer: torch.tensor([A]),
    "array": lambda tokenizer: np.array(A),
    "ids of numpy": lambda tokenizer: list(np.array(A)),
    "list of a tensor": lambda tokenizer: [torch.tensor(A)],
    "tokenizer": lambda tokenizer: tokenizer(TEXT),
    "tokenizer, torch": lambda tokenizer: tokenizer(TEXT, return_tensors="pt"),
    "tokenizer, numpy": lambda tokenizer: tokenizer([TEXT], return_tensors="np"),
    "tokenizer, list": lambda tokenizer: tokenizer([TEXT]),
    "mapping": lambda tokenizer: {"input_ids": A},
    "mapping of text": lambda tokenizer: {"text": TEXT},
    "list of an encoding": lambda tokenizer: [tokenizer(TEXT)],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_row(form: str, inputs: Get, local: Get) -> None:
    """Text, ids, tensors and encodings give the plain call's logits, bit for bit (H13)."""
    module, model = inputs("T-LLAMA")
    tokenizer = local("T-LLAMA").tokenizer
    given = FORMS[form](tokenizer)
    before = repr(given)
    prepared = one(model, given)
    right = logits(module, **tokenizer(TEXT, return_tensors="pt"))
    assert torch.equal(logits(module, **prepared.arguments), right)
    assert (prepared.spans, prepared.lengths) == (((0, 1),), (5,))
    assert repr(given) == before


def test_keywords_are_an_input(inputs: Get, local: Get) -> None:
    """An encoding is passed as keywords too, or beside the ids that it belongs to (H13)."""
    module, model = inputs("T-GPT2")
    ids, mask = torch.tensor([A]), torch.tensor([[1, 1, 0, 1, 1]])
    right = logits(module, input_ids=ids, attention_mask=mask)
    for prepared in (
        one(model, input_ids=ids, attention_mask=mask),
        one(model, A, attention_mask=mask),
    ):
        assert torch.equal(logits(module, **prepared.arguments), right)
    assert not torch.allclose(logits(module, input_ids=ids), right, atol=1e-4)


def test_a_single_row_is_passed_as_it_is(inputs: Get) -> None:
    """One invoke without padding gets no mask and no positions that the user did not give (H14)."""
    _, model = inputs("T-GPT2")
    ids = torch.tensor([A])
    arguments = one(model, ids).arguments
    assert list(arguments) == ["input_ids"]
    assert arguments["input_ids"] is ids
    assert sorted(one(model, TEXT).arguments) == ["attention_mask", "input_ids"]


def test_flags_of_the_forward_reach_it(inputs: Get) -> None:
    """What is no tensor, such as `output_hidden_states`, is passed beside the rows (H13)."""
    module, model = inputs("T-LLAMA")
    prepared = one(model, A, output_hidden_states=True, logits_to_keep=torch.tensor([4]))
    with torch.no_grad():
        output = module(**prepared.arguments)
    assert len(output.hidden_states) == module.config.num_hidden_layers + 1
    assert output.logits.shape[1] == 1


def test_segments_are_left_out_where_a_model_has_none(inputs: Get) -> None:
    """Token types that a tokenizer gives anyway do not reach a decoder without them (H13)."""
    given = {"input_ids": [A], "token_type_ids": [[0] * 5]}
    module, model = inputs("T-LLAMA")
    arguments = model.prepare([model.encode(given)], generate=True).arguments
    assert module.generate(**arguments, max_new_tokens=1).shape == (1, 6)
    with pytest.raises(ValueError, match="not used by the model.*token_type_ids"):
        module.generate(**arguments, token_type_ids=torch.zeros(1, 5).long(), max_new_tokens=1)
    assert "token_type_ids" in one(inputs("T-GPT2")[1], given).arguments


def test_chat_messages_go_through_the_template(local: Get) -> None:
    """Messages are the template's ids with its generation prompt; a list of chats is rows (O14)."""
    tokenizer = word_tokenizer(pad_token="t3")
    model = Inputs(
        local("T-LLAMA").load(), Checkpoint(local("T-LLAMA").load(), tokenizer=tokenizer)
    )
    messages = [{"role": "user", "content": "t20 t21"}]
    assert one(model, messages).arguments["input_ids"].tolist() == [[9, 20, 21, 8]]
    both = one(model, [messages, [{"role": "user", "content": "t30"}]])
    assert both.lengths == (4, 3)
    assert both.arguments["input_ids"][1].tolist()[1:] == [9, 30, 8]


def test_a_tokenizer_that_is_passed_is_not_changed(local: Get) -> None:
    """Rows are padded with the end of a text where there is no padding token (H14)."""
    tokenizer = word_tokenizer()
    module = local("T-BLOOM").load()
    model = Inputs(module, Checkpoint(module, tokenizer=tokenizer))
    module.config.pad_token_id, before = None, module.config.pad_token_id
    try:
        assert one(model, [TEXT, OTHER]).arguments["input_ids"][1, :2].tolist() == [1, 1]
    finally:
        module.config.pad_token_id = before
    assert tokenizer.pad_token is None


# --- what is no input ----------------------------------------------------------------------------

UNUSABLE: dict[str, tuple[Any, str]] = {
    "number": (3, "Got int as input. Accepted are text"),
    "nothing": (None, "Got NoneType"),
    "bytes": (b"t11", "Got bytes"),
    "empty text": ("", "Empty input"),
    "empty list": ([], "Empty input"),
    "empty row": ([[]], "Empty input"),
    "empty tensor": (torch.zeros(1, 0, dtype=torch.long), "Empty input"),
    "empty mapping": ({}, "nothing to run LlamaForCausalLM on: its input is 'input_ids'"),
    "floats": ([0.5, 1.0], "Got a list of float"),
    "booleans": ([True, False], "Got a list of bool"),
    "float tensor": (torch.ones(1, 5), "Got a tensor of float32 [1, 5]"),
    "three axes": (torch.ones(1, 2, 3, dtype=torch.long), "Got a tensor of int64 [1, 2, 3]"),
    "nested too deep": ([[A, B]], "a list is the rows of one invoke"),
    "mask of another length": (
        {"input_ids": [A], "attention_mask": [[1, 1]]},
        "attention_mask has the shape (1, 2) and input_ids (1, 5)",
    ),
    "unknown key": ({"input_id": [A]}, "takes no 'input_id'. Did you mean 'input_ids'?"),
    "no processor": ({"text": TEXT, "images": [1]}, "images and text need a processor"),
}


@pytest.mark.parametrize("form", UNUSABLE)
def test_what_is_no_input_is_refused(form: str, inputs: Get) -> None:
    """An unusable input is a `PromptError` with what was got and what is accepted (H13)."""
    given, message = UNUSABLE[form]
    with pytest.raises(PromptError) as caught:
        one(inputs("T-LLAMA")[1], given)
    assert message in str(caught.value)


def test_two_inputs_are_refused(inputs: Get) -> None:
    """Two positional inputs are refused with the list to write instead (H13)."""
    with pytest.raises(PromptError, match=r"Got 2 positional inputs.*\[first, second\]"):
        inputs("T-LLAMA")[1].encode(A, B)


def test_text_needs_a_tokenizer(local: Get) -> None:
    """A checkpoint without a tokenizer takes ids, and says so of text (H13)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
    model = Inputs(module, Checkpoint(module))
    with pytest.raises(PromptError, match="this checkpoint has no tokenizer. Pass token ids"):
        model.encode(TEXT)
    with pytest.raises(PromptError, match="Got chat messages, and this checkpoint has no"):
        model.encode([{"role": "user", "content": "t20"}])
    assert one(model, A).arguments["input_ids"].device.type == "cpu"


def test_a_template_is_needed_for_chats(inputs: Get) -> None:
    """Chat messages for a tokenizer without a template are refused (O14)."""
    with pytest.raises(PromptError, match="has no chat template"):
        inputs("T-LLAMA")[1].encode([{"role": "user", "content": "t20"}])


# --- images and sound ----------------------------------------------------------------------------


def _picture() -> Any:
    images = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(3)
    return images.fromarray(generator.integers(0, 255, (20, 20, 3), dtype=np.uint8))


def test_images_become_rows_between_the_text(inputs: Get, local: Get) -> None:
    """An image of 16 patches among 5 tokens is 21 rows, and its span is told (H13, case 95)."""
    module, model = inputs("T-LLAVA")
    text = "t5 t6 <image> t7 t8 t9"
    prepared = one(model, text, images=_picture())
    plain = local("T-LLAVA").processor(text=text, images=_picture(), return_tensors="pt")
    assert prepared.lengths == (21,)
    assert prepared.images == (((2, 18),),)
    right = logits(module, **plain)
    assert torch.equal(logits(module, **prepared.arguments), right)
    assert torch.equal(logits(module, **one(model, plain).arguments), right)
    other = {**plain, "pixel_values": -plain["pixel_values"]}
    assert (logits(module, **other) - right).abs().max() > 1e-3


def test_chat_messages_may_hold_images(inputs: Get) -> None:
    """Messages with an image go through the processor's template (H13)."""
    _, model = inputs("T-LLAVA")
    content = [{"type": "image", "image": _picture()}, {"type": "text", "text": "t20"}]
    prepared = one(model, [{"role": "user", "content": content}])
    assert prepared.arguments["input_ids"].tolist() == [[9, *[IMAGE] * 16, 20, 8]]
    assert prepared.arguments["pixel_values"].shape == (1, 3, 16, 16)


def test_a_model_with_images_takes_text_alone(inputs: Get) -> None:
    """A prompt without an image works on a vision-language model (H13)."""
    module, model = inputs("T-LLAVA")
    prepared = one(model, TEXT)
    assert prepared.images == ((),)
    right = logits(module, input_ids=torch.tensor([A]))
    assert torch.equal(logits(module, **prepared.arguments), right)


def test_images_of_a_vision_model(inputs: Get, local: Get) -> None:
    """A picture, a list of them and pixel values are the rows of a vision model (H13)."""
    module, model = inputs("T-VIT")
    plain = local("T-VIT").image_processor(_picture(), return_tensors="pt")
    right = logits(module, **plain)
    for given in (_picture(), [_picture()], plain, plain["pixel_values"], {"images": _picture()}):
        assert torch.equal(logits(module, **one(model, given).arguments), right)
    assert one(model, [_picture(), _picture()]).spans == ((0, 2),)
    assert one(model, _picture()).lengths == ()


def test_images_have_the_dtype_of_the_weights(folder: Get) -> None:
    """What a processor makes is converted, what a user gives is left as it is (H13)."""
    checkpoint = Checkpoint(folder("T-VIT"), dtype="bfloat16")
    model = Inputs(checkpoint.load(), checkpoint)
    made = one(model, _picture()).arguments["pixel_values"]
    assert made.dtype == torch.bfloat16
    assert one(model, made.float()).arguments["pixel_values"].dtype == torch.float32


def test_sound_needs_tokens_for_the_decoder(inputs: Get, local: Get) -> None:
    """A waveform is made features of; one forward of a recogniser asks for decoder ids (H19)."""
    module, model = inputs("T-WHISPER")
    wave = np.sin(np.arange(1600) / 7).astype(np.float32)
    plain = local("T-WHISPER").feature_extractor(wave, sampling_rate=16000, return_tensors="pt")
    decoder = torch.tensor([[5, 6, 7]])
    right = logits(module, **plain, decoder_input_ids=decoder)
    for given in (wave, torch.tensor(wave), list(map(float, wave)), [wave], plain):
        prepared = one(model, given, decoder_input_ids=[[5, 6, 7]])
        assert torch.equal(logits(module, **prepared.arguments), right)
    message = r"WhisperForConditionalGeneration has a decoder.*decoder_input_ids=\[\[5\]\]"
    with pytest.raises(PromptError, match=message):
        one(model, wave)
    assert model.prepare([model.encode(wave)], generate=True).rows == 1


# --- a decoder beside the encoder ----------------------------------------------------------------


def test_an_encoder_decoder_takes_tokens_for_both(inputs: Get, local: Get) -> None:
    """Decoder ids or a target text go beside the encoder's text; without them it is told (H13)."""
    module, model = inputs("T-T5")
    ids = {"input_ids": torch.tensor([A]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    right = logits(module, **ids, decoder_input_ids=torch.tensor([[3, 21]]))
    for given in (
        {"text": TEXT, "decoder_input_ids": [[3, 21]]},
        {"input_ids": A, "decoder_input_ids": [[3, 21]]},
    ):
        assert torch.equal(logits(module, **one(model, given).arguments), right)
    labelled = one(model, text=TEXT, text_target="t21 t22").arguments
    assert labelled["labels"].tolist() == [[21, 22]]
    assert torch.equal(
        logits(module, **labelled)[:, :2],
        logits(module, **ids, decoder_input_ids=torch.tensor([[3, 21]])),
    )
    with pytest.raises(PromptError, match=r"Pass decoder_input_ids=\[\[3\]\] \(its start token\)"):
        one(model, TEXT)


def test_a_decoder_that_is_filled_in_is_left_alone(inputs: Get) -> None:
    """BART makes its decoder's input of the encoder's, and nothing is asked for (H13)."""
    module, model = inputs("T-BART")
    prepared = one(model, A)
    assert list(prepared.arguments) == ["input_ids"]
    right = logits(module, input_ids=torch.tensor([A]))
    assert torch.equal(logits(module, **prepared.arguments), right)


# --- what the forward's keywords are -------------------------------------------------------------


class Wrapper(torch.nn.Module):
    """As remote code may be: a forward that hands on whatever it is given."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner model, keeping no flag."""
        kwargs.pop("output_hidden_states", None)
        return self.inner(*args, **kwargs)


def test_a_forward_of_keywords_only(local: Get) -> None:
    """A wrapper whose forward takes ``**kwargs`` is given what there is (H13, case 83)."""
    inner = local("T-LLAMA").load()
    model = Inputs(Wrapper(inner), Checkpoint(inner, tokenizer=local("T-LLAMA").tokenizer))
    encoding = BatchEncoding({"input_ids": torch.tensor([A])})
    right = logits(inner, input_ids=torch.tensor([A]))
    assert torch.equal(logits(Wrapper(inner), **one(model, encoding).arguments), right)
    assert torch.equal(logits(Wrapper(inner), **one(model, TEXT).arguments), right)


def test_a_single_row_may_lack_the_axis_of_rows(inputs: Get) -> None:
    """What is given for one row's tokens is that row, also beside a positional input (H13)."""
    module, model = inputs("T-LLAMA")
    made = one(model, A, labels=A, attention_mask=[1] * len(A)).arguments
    assert {name: tuple(each.shape) for name, each in made.items()} == dict.fromkeys(made, (1, 5))
    both = model.prepare([model.encode(A, labels=A), model.encode(A[:3], labels=A[:3])]).arguments
    whole = model.prepare([model.encode(A, labels=[A]), model.encode(A[:3], labels=[A[:3]])])
    assert both["labels"].tolist() == whole.arguments["labels"].tolist()
    module, model = inputs("T-T5")
    made = one(model, A, decoder_input_ids=[3]).arguments
    assert made["decoder_input_ids"].tolist() == [[3]]
    right = logits(module, input_ids=torch.tensor([A]), decoder_input_ids=torch.tensor([[3]]))
    assert torch.equal(logits(module, **made), right)
    module, model = inputs("T-LLAMA-CLASSES")
    assert one(model, A, labels=[1]).arguments["labels"].tolist() == [1]
