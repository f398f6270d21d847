"""What is known of Hugging Face models: blocks, caches, by-products, how losses count."""

import peft
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from pipeswift_lightning.runtime.materialise import Materialiser, absent_names
from pipeswift_lightning.strategies.hugging_face import (
    blocks,
    initialiser,
    predicts_next_token,
    returned,
    without_caches,
)
from tests.helpers import huggingface as hf


def _kinds(model: nn.Module) -> list[str]:
    return [type(block).__name__ for block in blocks(model)]


def test_blocks_are_the_encoders_then_the_decoders_and_nothing_smaller() -> None:
    vision, text = ["Qwen3VLVisionBlock"] * 3, ["Qwen3VLTextDecoderLayer"] * 4
    assert _kinds(hf.vision_language("Qwen3VL")) == vision + text
    assert _kinds(hf.bert("MaskedLM")) == ["BertLayer"] * 4
    assert _kinds(hf.lora()) == ["LlamaDecoderLayer"] * 4
    assert _kinds(nn.Sequential(nn.Linear(1, 1))) == []


def test_caches_are_off_within_and_on_again_after() -> None:
    model = hf.gpt2()
    assert model.config.use_cache
    with without_caches(nn.Sequential(model)):
        assert not model.config.use_cache
    assert model.config.use_cache


def test_causal_losses_count_from_the_second_label_on() -> None:
    assert predicts_next_token(hf.vision_language("Qwen2_5_VL"))
    assert predicts_next_token(hf.lora())
    assert predicts_next_token(hf.gpt2())  # whose class's name tells no kind of loss
    assert not predicts_next_token(hf.bert("MaskedLM"))
    assert not predicts_next_token(nn.Linear(1, 1))


def test_adapters_on_the_meta_device_begin_as_peft_lets_them_begin() -> None:
    with torch.device("meta"):
        model = hf.causal("Llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, config)
    materialiser = Materialiser(
        adapted, find=lambda names: None, initialise=initialiser(adapted), seed=1
    )
    materialiser.parameters(absent_names(adapted))
    parts = {n: p for n, p in adapted.named_parameters() if "lora_" in n}
    assert all(p.eq(0).all() for n, p in parts.items() if "lora_B" in n)
    # Kaiming's bound for 16 inputs; the model's own rule would give a deviation of 0.02.
    largest = [p.abs().max() for n, p in parts.items() if "lora_A" in n]
    assert all(0.15 < x <= 0.25 for x in largest)


def test_what_encoders_returned_on_the_way_is_left_out() -> None:
    output = CausalLMOutputWithPast(logits=torch.ones(1))
    output["image_outputs"] = BaseModelOutput(last_hidden_state=torch.ones(1))
    output["image_hidden_states"] = torch.ones(1)
    output["image_embeds"] = torch.ones(1)
    output["other"] = BaseModelOutput(last_hidden_state=torch.ones(1))
    assert returned(output).keys() == {"logits", "image_embeds"}
    assert returned((1, output)) == (1, output)
