"""Every parameter's gradient, by name, against plain autograd over unpadded rows: families, sizes, options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longstraw import Runtime
from tests.parity.models import (
    FAMILIES,
    SMALL,
    add_lora,
    assert_parity,
    build,
    check_parity,
    distance,
    make_group,
    paged_step,
    plain_step,
    settings,
    worst,
)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_family(kind: str, tie: bool) -> None:
    model = build(kind, tie_word_embeddings=tie)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tie
    check_parity(model, [make_group()])


def test_qwen2_has_the_biases_that_the_suite_is_for() -> None:
    names = [name for name, _ in build("qwen2").named_parameters()]
    assert sum(name.endswith("k_proj.bias") for name in names) == 2


@pytest.mark.parametrize("kind", ["llama", "qwen2", "starcoder2"])
def test_eager_attention_is_the_same_reference(kind: str) -> None:
    model = build(kind, attn_implementation="eager")
    check_parity(model, [make_group()])
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    ("prompt_tokens", "lengths"),
    [
        (1, (3, 1, 6)),
        (2, (3, 1, 6)),
        (17, (4, 1, 9)),  # below one chunk, one row past a page
        (24, (4, 1, 9)),  # 23 captured rows: exactly one chunk
        (61, (7, 1, 12, 5)),  # no multiple of chunk or page
        (70, (1, 1, 1)),
        (65, (40, 1, 3)),  # a branch wider than a lane
    ],
)
def test_sizes(prompt_tokens: int, lengths: tuple[int, ...], checkpoint: bool) -> None:
    check_parity(
        build("qwen3", num_hidden_layers=3),
        [make_group(prompt_tokens, lengths)],
        settings(replay={"checkpoint": checkpoint}),
    )


@pytest.mark.parametrize(("chunk", "page", "block"), [(1, 1, 1), (7, 4, 8), (16, 16, 16), (200, 256, 256)])
def test_chunks_pages_and_blocks(chunk: int, page: int, block: int) -> None:
    config = settings(capture={"chunk_tokens": chunk}, pages={"tokens": page, "block_tokens": block})
    check_parity(build("llama"), [make_group(33, (5, 1, 3))], config)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("keep", ["always", "never"])
def test_attention_outputs_on_pages(keep: str, checkpoint: bool) -> None:
    config = settings(capture={"keep_attention": keep}, replay={"checkpoint": checkpoint})
    check_parity(build("qwen3", num_hidden_layers=3), [make_group(), make_group(2, (1, 3), 1)], config)
    check_parity(add_lora(build("llama")), [make_group()], config)


def test_default_settings() -> None:
    check_parity(build("llama"), [make_group()], {})


def test_default_settings_with_a_prompt_of_several_chunks() -> None:
    # Attention outputs are kept from 256 tokens on; a chunk has 1,024 and a page as many.
    model = build("llama", num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2_500)
    check_parity(model, [make_group(2_100, (30, 1, 60))], {})


@pytest.mark.parametrize("lookahead", [1, 5])
def test_lookahead(lookahead: int) -> None:
    check_parity(build("llama"), [make_group()], settings(pages={"lookahead": lookahead}))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
def test_several_groups_in_one_accumulate(checkpoint: bool) -> None:
    groups = [make_group(61, (7, 1, 12, 5), 0), make_group(2, (3, 1, 2), 1), make_group(30, (1, 8, 2), 2)]
    check_parity(build("qwen3", tie_word_embeddings=True), groups, settings(replay={"checkpoint": checkpoint}))


def test_gradients_of_accumulate_arrive_at_its_end() -> None:
    model = build()
    runtime = Runtime(model, SMALL)
    with runtime.accumulate():
        paged_step(runtime, [make_group()])
        assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_transformers_own_checkpointing_is_off_within_and_on_behind() -> None:
    model = build("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_parity(model, [make_group()])
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize("temperature", [0.7, 1.9])
@pytest.mark.parametrize("block", [3, 1024])
def test_temperature_and_entropy(temperature: float, block: int) -> None:
    replay = {"temperature": temperature, "entropy": True, "logit_block_tokens": block}
    check_parity(build("llama"), [make_group()], settings(replay=replay))


def test_the_entropy_reaches_the_gradient() -> None:
    model, group = build("llama"), make_group()
    reference = copy.deepcopy(model)
    plain_step(reference, [group], entropy=True)
    paged_step(Runtime(model, SMALL), [group])
    assert worst(model, reference)[-1][0] > 1e-3


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_gradient_is_added_to_what_was_there(scale: float) -> None:
    model, group = build(), make_group()
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * scale
    model.lm_head.weight.grad = None
    reference = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    plain_step(reference, [group])
    before = model.model.norm.weight.grad
    paged_step(Runtime(model, SMALL), [group])
    assert model.model.norm.weight.grad is before, "the tensor that others may hold was replaced"
    assert_parity(model, reference)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
def test_a_loss_that_reaches_parameters_directly(checkpoint: bool) -> None:
    def extra(model: Any) -> torch.Tensor:
        return 0.3 * model.model.layers[0].mlp.up_proj.weight.square().sum() + model.model.norm.weight.sum()

    model, group = build(), make_group()
    reference = copy.deepcopy(model)
    plain_step(reference, [group], extra=extra)
    paged_step(Runtime(model, settings(replay={"checkpoint": checkpoint})), [group], extra=lambda: extra(model))
    assert_parity(model, reference)


def test_some_parameters_frozen() -> None:
    model = build("llama", num_hidden_layers=3)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1" in name)
    check_parity(model, [make_group()])


def test_only_the_last_layer_trained() -> None:
    # Nothing trained is behind the prompt's keys of layers 0 and 1; those of the last layer train its projections.
    model = build("llama", num_hidden_layers=3)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.2" in name or "norm" in name)
    check_parity(model, [make_group()])


def test_only_the_head_trained() -> None:
    model = build("llama")
    for name, p in model.named_parameters():
        p.requires_grad_("lm_head" in name)
    check_parity(model, [make_group()])


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3"])
def test_lora(kind: str, checkpoint: bool) -> None:
    model = add_lora(build(kind))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    check_parity(model, [make_group()], settings(replay={"checkpoint": checkpoint}))


def test_lora_on_a_few_modules_of_the_later_layers() -> None:
    model = add_lora(build("llama", num_hidden_layers=3), target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    check_parity(model, [make_group()])


def test_lora_on_the_head_with_a_trained_embedding() -> None:
    model = add_lora(build("qwen2"), target_modules=["q_proj", "lm_head"])
    model.get_input_embeddings().weight.requires_grad_(True)
    check_parity(model, [make_group()], settings(replay={"entropy": True, "temperature": 1.3}))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_lora_on_a_head_tied_to_a_trained_embedding() -> None:
    model = add_lora(build("llama", tie_word_embeddings=True), target_modules=["q_proj", "lm_head"])
    model.get_input_embeddings().weight.requires_grad_(True)
    check_parity(model, [make_group()], settings(replay={"entropy": True}))


def test_lora_in_eval_mode_with_dropout_configured() -> None:
    check_parity(add_lora(build("llama"), lora_dropout=0.3).eval(), [make_group()])


def test_float32() -> None:
    check_parity(build("llama", dtype=torch.float32), [make_group()], tolerance=1e-3)


def test_detached_leaves_out_what_flows_through_the_prompt() -> None:
    model, group = build("llama"), make_group()
    exact = copy.deepcopy(model)
    plain_step(exact, [group])
    paged_step(Runtime(model, settings(gradient={"prompt": "detached"})), [group])
    assert worst(model, exact)[0][0] > 0.1
    for layer in model.model.layers:
        assert layer.self_attn.q_proj.weight.grad is not None

    # The same approximation by other means: the prompt's keys and values detached in a plain cache.
    from transformers import DynamicCache

    reference = copy.deepcopy(model)
    reference.zero_grad()
    for i, response in enumerate(group.responses):
        cache = DynamicCache(config=reference.config)
        with torch.no_grad():
            reference(group.prompt[None, :-1], past_key_values=cache)
        row = torch.cat([group.prompt[-1:], response[:-1]])
        log_p = reference(row[None], past_key_values=cache).logits[0].log_softmax(-1)
        group.loss(i, log_p.gather(-1, response[:, None])[:, 0], None).backward()
    assert_parity(model, reference)


@pytest.mark.parametrize(
    ("kind", "checkpoint"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)]
)
def test_bfloat16_is_as_near_to_float64_as_plain_bfloat16(kind: str, checkpoint: bool) -> None:
    # Where a rounding falls is luck: one seed is up to 20% better or worse, so several are averaged.
    ratios = []
    for seed in range(5):
        group = make_group(70, (7, 1, 12, 5, 3), seed)
        ours = build(kind, dtype=torch.bfloat16, seed=seed)
        plain, reference = copy.deepcopy(ours), copy.deepcopy(ours).double()
        plain_step(plain, [group])
        plain_step(reference, [group])
        paged_step(Runtime(ours, settings(replay={"checkpoint": checkpoint})), [group])
        assert all(p.grad.dtype == torch.bfloat16 for p in ours.parameters())
        ratios.append(distance(ours, reference) / distance(plain, reference))
    assert sum(ratios) / len(ratios) <= 1.1, ratios
