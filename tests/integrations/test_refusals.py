"""What cannot be carried exactly is refused by name before anything runs; so is input that is no group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

from longstraw import Runtime
from longstraw.errors import ConfigError, TransactionStateError, UnsupportedModelError
from longstraw.integrations.transformers import adapter as adapter_module
from tests.parity.models import SMALL, add_lora, assert_idle, build, make_group, paged_step, plain_step, worst

GROUP = make_group(30, (4, 1, 7))

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def other_model(kind: str, **config: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(TINY | config)))


def untouched(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters()) and not any("forward" in m.__dict__ for m in model.modules())


# Attention and architecture


@pytest.mark.parametrize(
    ("kind", "config", "name"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "GPT2"),
        ("mamba", {"state_size": 4}, "Mamba"),
        ("gpt_neox", {}, "GPTNeoX"),
        ("cohere", {}, "Cohere"),
        ("granite", {}, "Granite"),
    ],
)
def test_an_unknown_attention_class(kind: str, config: dict[str, Any], name: str) -> None:
    model = other_model(kind, **config)
    with pytest.raises(UnsupportedModelError, match=rf"{name}\w*.*(not supported|expected one|attention modules)"):
        Runtime(model, SMALL)
    assert untouched(model)


@pytest.mark.parametrize("before", [True, False])
def test_tuples_in_the_place_of_outputs(before: bool) -> None:
    """transformers' own models fail on them; without the guard that is an AttributeError from the middle of one."""
    model = build("llama")
    runtime = None if before else Runtime(model, SMALL)
    model.config.return_dict = False
    with pytest.raises(UnsupportedModelError, match=r"config\.return_dict is False.*set it to True"):
        (runtime or Runtime(model, SMALL)).transaction(GROUP.prompt)
    with pytest.raises(AttributeError):
        model(input_ids=GROUP.prompt[None], use_cache=False)
    assert untouched(model)


def test_an_attention_class_of_the_users_own() -> None:
    model = build("llama")

    class OddAttention(type(model.model.layers[1].self_attn)):  # type: ignore[misc]
        pass

    model.model.layers[1].self_attn.__class__ = OddAttention
    with pytest.raises(
        UnsupportedModelError, match=r"layer 1 .*OddAttention.*supported are .*LlamaAttention.*docs/adding_a_family\.md"
    ):
        Runtime(model, SMALL)
    assert (Path(__file__).parents[2] / "docs" / "adding_a_family.md").is_file()


def test_an_encoder_decoder() -> None:
    config = AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration"):
        Runtime(AutoModelForSeq2SeqLM.from_config(config), SMALL)


def test_a_model_without_a_head() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no LM head"):
        Runtime(build("llama").model, SMALL)


def test_no_transformers_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear is no transformers model"):
        Runtime(nn.Linear(2, 2), SMALL)


class ScaledLlama(LlamaForCausalLM):
    """As Granite and Cohere do: the logits are scaled behind the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


def test_logits_that_are_changed_behind_the_head() -> None:
    model = ScaledLlama(LlamaConfig(**TINY, tie_word_embeddings=False))
    with pytest.raises(UnsupportedModelError, match="ScaledLlama changes its logits"):
        paged_step(Runtime(model, SMALL), [GROUP])
    assert untouched(model)


def test_without_that_guard_the_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module.TransformersAdapter, "_check_untouched", lambda self, result: None)
    model = ScaledLlama(LlamaConfig(**TINY, tie_word_embeddings=False)).double()
    reference = ScaledLlama(model.config).double()
    reference.load_state_dict(model.state_dict())
    paged_step(Runtime(model, SMALL), [GROUP])
    plain_step(reference, [GROUP])
    assert worst(model, reference)[0][0] > 0.01


# Wrappers


def test_a_compiled_model() -> None:
    compiled: Any = torch.compile(build("llama"))
    with pytest.raises(UnsupportedModelError, match="compiled"):
        Runtime(compiled, SMALL)
    model = build("llama")
    model.compile()
    with pytest.raises(UnsupportedModelError, match="compiled"):
        Runtime(model, SMALL)


def compile_layer(model: Any) -> None:
    model.model.layers[1].compile()


def wrap_layer(model: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0])


def wrap_attention(model: Any) -> None:
    model.model.layers[0].self_attn = torch.compile(model.model.layers[0].self_attn)


def wrap_body(model: Any) -> None:
    model.model = torch.compile(model.model)


@pytest.mark.parametrize("compile_part", [compile_layer, wrap_layer, wrap_attention, wrap_body])
def test_compiled_parts(compile_part: Any) -> None:
    model = build("llama")
    compile_part(model)
    with pytest.raises(UnsupportedModelError, match=r"model\S* is compiled, and has parts that work otherwise"):
        Runtime(model, SMALL)


@pytest.mark.parametrize("part", ["", "model.layers.1", "lm_head"])
def test_parts_that_are_compiled_later(part: str) -> None:
    model = build("llama")
    runtime = Runtime(model, SMALL)
    model.get_submodule(part).compile()
    with pytest.raises(UnsupportedModelError, match=f"{part or 'the model'} is compiled"):
        runtime.transaction(GROUP.prompt)
    assert untouched(model)


def test_compiled_mlps_are_as_exact() -> None:
    model = build("llama")
    reference = build("llama")
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    paged_step(Runtime(model, SMALL), [GROUP])
    plain_step(reference, [GROUP])
    assert worst(model, reference)[0][0] < 1e-6


@pytest.mark.parametrize("part", ["self_attn", ""])
def test_layers_that_share_an_attention(part: str) -> None:
    model = build("llama")
    if part:
        setattr(model.model.layers[1], part, getattr(model.model.layers[0], part))
    else:
        model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedModelError, match="layer 1 of LlamaForCausalLM shares its LlamaAttention"):
        Runtime(model, SMALL)


def test_data_parallel() -> None:
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        Runtime(nn.DataParallel(build("llama")), SMALL)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompt_learning(kind: str) -> None:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match=r"adapter 'default'.*adds tokens to the prompt"):
        Runtime(peft.get_peft_model(build("llama"), config), SMALL)


def test_parameters_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    with pytest.raises(UnsupportedModelError, match="meta"):
        Runtime(model, SMALL)


# Dropout


def test_dropout_of_a_module() -> None:
    model = build("phi3", resid_pdrop=0.1)
    with pytest.raises(UnsupportedModelError, match=r"resid_attn_dropout drops out with p=0\.1"):
        Runtime(model, SMALL)
    Runtime(model.eval(), SMALL)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("llama", "attention_dropout"), ("starcoder2", "residual_dropout"), ("starcoder2", "embedding_dropout")],
)
def test_dropout_of_a_function(kind: str, key: str) -> None:
    changes: dict[str, Any] = {key: 0.1}
    model = build(kind, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"config\.{key} is 0\.1"):
        Runtime(model, SMALL)
    paged_step(Runtime(model.eval(), SMALL), [GROUP])


def test_dropout_of_lora() -> None:
    model = add_lora(build("llama"), lora_dropout=0.2)
    with pytest.raises(UnsupportedModelError, match=r"lora_dropout.*p=0\.2"):
        Runtime(model.train(), SMALL)


def test_dropout_that_is_switched_on_later() -> None:
    model = add_lora(build("llama"), lora_dropout=0.2).eval()
    runtime = Runtime(model, SMALL)
    paged_step(runtime, [GROUP])
    model.train()
    with pytest.raises(UnsupportedModelError, match="lora_dropout"):
        runtime.transaction(GROUP.prompt)


# Input


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        (torch.zeros(1, 5, dtype=torch.int64), ValueError, r"prompt_ids has shape \(1, 5\)"),
        (torch.zeros(5), TypeError, r"prompt_ids has dtype torch.float32"),
        (torch.zeros(0, dtype=torch.int64), ValueError, r"prompt_ids is empty"),
        (torch.tensor([1, 97]), ValueError, r"prompt_ids holds token id 97, outside .* 97"),
        (torch.tensor([1, -100]), ValueError, r"prompt_ids holds token id -100"),
        ([1, 2], TypeError, r"prompt_ids is a list"),
    ],
)
def test_a_prompt_that_is_none(prompt: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Runtime(build("llama"), SMALL).transaction(prompt)


@pytest.mark.parametrize(
    ("responses", "error", "text"),
    [
        (torch.zeros(3, 5, dtype=torch.int64), TypeError, r"one tensor of shape \(3, 5\)"),
        ([], ValueError, r"responses is empty"),
        ([torch.tensor([1]), torch.zeros(0, dtype=torch.int64)], ValueError, r"responses\[1\] is empty"),
        ([torch.zeros(1, 5, dtype=torch.int64)], ValueError, r"responses\[0\] has shape"),
        ([torch.ones(5)], TypeError, r"responses\[0\] has dtype"),
        ([torch.tensor([1]), torch.tensor([97])], ValueError, r"responses\[1\] holds token id 97"),
    ],
)
@pytest.mark.parametrize("call", ["score", "replay"])
def test_responses_that_are_none(responses: Any, error: type[Exception], text: str, call: str) -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(error, match=text), runtime.transaction(GROUP.prompt) as txn:
        getattr(txn, call)(responses)
    assert_idle(runtime)


def test_int32_ids_are_ids() -> None:
    runtime = Runtime(build("llama"), SMALL)
    narrow: list[Tensor] = [r.int() for r in GROUP.responses]
    with runtime.transaction(GROUP.prompt.int()) as txn:
        found = txn.score(narrow)
        expected = txn.score(GROUP.responses)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_reference_without_adapters_or_on_another_device() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="no PEFT adapters"):
        runtime.score(GROUP.prompt, GROUP.responses, adapter=None)
    with torch.device("meta"):
        elsewhere = LlamaForCausalLM(LlamaConfig(**TINY))
    with pytest.raises((ConfigError, UnsupportedModelError), match="meta"):
        runtime.score(GROUP.prompt, GROUP.responses, model=elsewhere)
