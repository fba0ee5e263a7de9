"""A few consecutive layers of real shape of a model family: gradients against float32, then a long prompt.

    python -m benchmarks.family_layers --family qwen3_6 --check 32768 16384 8192 --prompt 131072

The check, at the first of these lengths that fits, compares with plain autograd on unpadded rows: the distance from a
float32 reference of the whole gradient, here and in the plain bfloat16 run of the same weights.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import sdpa_attention
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.common import Record, free_memory, random_group
from benchmarks.step import loss_of
from longstraw import Runtime

SHAPES: dict[str, dict[str, Any]] = {
    # Three gated-delta layers and one full-attention layer of Qwen3.6-27B.
    "qwen3_6": {
        "vocab_size": 248_320, "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 4,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "max_position_embeddings": 1 << 20,
    },
    # Three mixture layers of GLM-5.2: one computes an index, two share it.
    "glm5_2": {
        "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 32,
        "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "qk_nope_head_dim": 192, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
        "mlp_layer_types": ["sparse"] * 3, "indexer_types": ["full", "shared", "shared"],
        "max_position_embeddings": 1 << 20,
    },
}  # fmt: skip


def build(family: str, experts: int | None) -> torch.nn.Module:
    shape = dict(SHAPES[family])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            if family == "qwen3_6":
                from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

                return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape)).train()
            from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

            if experts is not None:
                shape["n_routed_experts"] = experts
            return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**shape)).train()
    finally:
        torch.set_default_dtype(torch.float32)


def plain(model: torch.nn.Module, ids: Tensor, responses: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of plain autograd, one unpadded row after another, each layer checkpointed."""
    total = sum(len(r) for r in responses)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for i, response in enumerate(responses):
        row = torch.cat([ids, response])[None].cuda()
        logits = model(input_ids=row, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
        chosen = logits.float().log_softmax(-1).gather(-1, response.cuda()[:, None])[:, 0]
        loss_of(chosen, (-1.0) ** i, total).backward()
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    return take(model)


def ours(runtime: Runtime, ids: Tensor, responses: list[Tensor]) -> dict[str, Any]:
    total = sum(len(r) for r in responses)
    start = time.perf_counter()
    with runtime.transaction(ids) as transaction:
        for lane in transaction.replay(responses):
            parts = [loss_of(lp, (-1.0) ** i, total) for i, lp in zip(lane.indices, lane.logprobs, strict=True)]
            lane.backward(sum(parts[1:], parts[0]))
    torch.cuda.synchronize()
    return {"wall_seconds": time.perf_counter() - start, **transaction.report.to_dict()}


def take(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients by name, in their own dtype and where they are: billions of values take minutes on a CPU."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative distance of the whole gradient, and the worst of any parameter."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    apart = {n: float((got[n].float() - want[n].float()).norm()) for n in want}
    norms = {n: float(want[n].float().norm()) for n in want}
    each = {n: apart[n] / norms[n] for n in want if norms[n] > 0}
    whole = (sum(x**2 for x in apart.values()) / sum(x**2 for x in norms.values())) ** 0.5
    return {"whole": whole, "median": sorted(each.values())[len(each) // 2], **each}


@contextmanager
def plain_rule() -> Iterator[None]:
    """The delta rule of transformers' own code: where flash-linear-attention is installed it hands over to that."""
    given = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = inspect.unwrap(given)
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = given


@contextmanager
def expanded_heads() -> Iterator[None]:
    """KV heads repeated for SDPA: of its float32 kernels only the one that holds all scores takes grouped ones."""
    given = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = given


def check(
    record: Record,
    family: str,
    model: torch.nn.Module,
    prompt: int,
    settings: dict[str, Any],
    rules: Sequence[str | None],
) -> None:
    """One float32 reference, and for each rule the plain bfloat16 run and ours beside it."""
    ids, responses = random_group(prompt, 4, 256, model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    responses[1] = responses[1][:1]
    start = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - start:.1f} s: {what}", flush=True)

    # The reference first: it needs the most, and what does not fit is known before the rest is computed.
    # flash-linear-attention would narrow its products.
    wide = copy.deepcopy(model).float()
    with plain_rule(), expanded_heads():
        truth = plain(wide, ids, responses)
    del wide
    peak = torch.cuda.max_memory_allocated() / 2**30
    tell("plain float32 run")
    for rule in rules:
        free_memory()
        with plain_rule() if rule == "torch" else nullcontext():
            narrow = plain(model, ids, responses)
        tell(f"plain bfloat16 run, rule {rule}")
        with Runtime(model, settings | with_rule(rule)) as runtime:
            ours(runtime, ids, responses)
        mine = take(model)
        tell(f"ours, rule {rule}")
        here, there = distance(mine, truth), distance(narrow, truth)
        worst = max((n for n in truth if n in here), key=lambda n: here[n] / max(there[n], 1e-9))
        record.add(
            "family layers: distance from float32", family=family, rule=rule, prompt=prompt,
            responses=[len(r) for r in responses],
            here=here["whole"], plain_bfloat16=there["whole"], ratio=here["whole"] / there["whole"],
            median_here=here["median"], median_plain=there["median"], float32_peak_gib=peak,
            worst_ratio=[worst, here[worst], there[worst]],
        )  # fmt: skip


def check_longest(
    record: Record,
    family: str,
    experts: int | None,
    prompts: Sequence[int],
    settings: dict[str, Any],
    rules: Sequence[str | None],
) -> None:
    """Check at the first of these lengths at which all runs fit."""
    model = build(family, experts)
    for prompt in prompts:
        free_memory()
        try:
            check(record, family, model, prompt, settings, rules)
            return
        except torch.OutOfMemoryError as error:
            print(f"{prompt} tokens do not fit: {str(error).splitlines()[0]}", flush=True)
            model.zero_grad(set_to_none=True)
    raise SystemExit("no length of --check fits")


def with_rule(rule: str | None) -> dict[str, Any]:
    """flash-linear-attention refuses some triton versions on this GPU, so what computes the delta rule is said."""
    return {} if rule is None else {"kernels": {"gated_delta": rule}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(SHAPES), required=True)
    parser.add_argument(
        "--check", type=int, nargs="*", default=[], help="prompt tokens of the gradient check, the next if one fails"
    )
    parser.add_argument("--prompt", type=int, nargs="*", default=[])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--experts", type=int)
    parser.add_argument(
        "--rule", nargs="+", default=["torch"], choices=["torch", "fla"], help="what computes the delta rule"
    )
    parser.add_argument("--device-cap", type=float, metavar="GIB", help="the most that this process takes of the GPU")
    parser.add_argument("--chunk", default="auto")
    parser.add_argument("--host-budget", default="80GiB")
    parser.add_argument("--out")
    options = parser.parse_args()
    record = Record(options.out)
    settings: dict[str, Any] = {
        "tiers": [{"kind": "host", "budget": options.host_budget}],
        "capture": {"chunk_tokens": options.chunk if options.chunk == "auto" else int(options.chunk)},
    }
    rules: list[str | None] = options.rule if options.family == "qwen3_6" else [None]
    if options.device_cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.device_cap * 2**30 / total)
    model = build(options.family, options.experts)
    for prompt, rule in product(options.prompt, rules):
        ids, responses = random_group(prompt, options.group, options.response, model.config.vocab_size)  # type: ignore[union-attr]
        free_memory()
        before = torch.cuda.memory_allocated()
        with Runtime(model, settings | with_rule(rule)) as runtime:
            report = ours(runtime, ids, responses)
        model.zero_grad(set_to_none=True)
        record.add(
            "family layers: long prompt", family=options.family, rule=rule, prompt=prompt, group=options.group,
            response=options.response, experts=getattr(model.config, "n_routed_experts", None),
            peak_beyond_weights_gib=(report["peak_device_bytes"] - before) / 2**30, report=report,
        )  # fmt: skip
    if options.check:
        del model
        check_longest(record, options.family, options.experts, options.check, settings, rules)


if __name__ == "__main__":
    main()
