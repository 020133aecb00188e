"""Sparrow, tables 2 and 4 and appendix D: what sparse decoding saves by its cost model, beside the paper.

The model counts reading and arithmetic alone (`rollout.sparsity.cost`), so its speed-ups are upper bounds.
The paper draws its schedules in a figure only; the ones assumed here grow in proportion to the length.
"""

from __future__ import annotations

from bench.papers_base import Claim, Row, Values
from echo_planes.config.kv_schedule import Schedule
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.rollout.sparsity.cost import Decoder, mean_read_tokens, token_s

# Weights, layers, KV heads and heads of their public config.json; all heads are of 128.
MODELS = {
    "Qwen3-1.7B": (1.72e9, 28, 8, 16),
    "Qwen3-4B": (4.02e9, 36, 8, 32),
    "Qwen3-8B": (8.19e9, 36, 8, 32),
    "Qwen3-14B": (14.77e9, 40, 8, 40),
}
TABLE_2 = {"Qwen3-1.7B": 2.21, "Qwen3-4B": 2.41, "Qwen3-8B": 2.06, "Qwen3-14B": 1.48}
TABLE_4 = {16_000: 4.59, 24_000: 5.13, 32_000: 5.41}  # ms a token of 8, Qwen3-1.7B, 64 pages of 16


def decoder(name: str) -> Decoder:
    num_params, layers, kv_heads, heads = MODELS[name]
    return Decoder(num_params, layers, 2.0 * layers * kv_heads * 128, heads / kv_heads)


def speed_up(name: str, values: Values) -> float:
    """Dense time by sparse time of a token, as the model has it."""
    model, facts = decoder(name), SKU_FACTS["H200"]
    most, bins = values["budget_tokens"][name] / 16, values["longest_tokens"] // 2000
    first = values["first_share"]
    pages = tuple(int(most * (first + (1 - first) * place / (bins - 1))) for place in range(bins))
    schedule = Schedule(pages=pages)
    lengths = (values["prompt_tokens"], values["answer_tokens"])
    dense, sparse = (
        token_s(
            model,
            mean_read_tokens(one, *lengths, model.num_layers),
            values["batch"],
            facts.bandwidth_gb_s * 1e9,
            facts.bf16_tflops * 1e12,
        )
        for one in (None, schedule)
    )
    return dense / sparse


def claim(assumed: dict[str, Values]) -> Claim:
    values = assumed["sparse"]
    rows, figures = [], {}
    for name, paper in TABLE_2.items():
        ours = figures[name] = speed_up(name, values)
        rows.append(
            Row(f"rollout of {name}, times as fast", f"{paper:.2f}", f"at most {ours:.2f}", ours >= paper)
        )
    order = [figures[name] for name in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B")]
    rows.append(
        Row(
            "larger models gain less, from 4B on",
            "yes",
            "yes" if order == sorted(order)[::-1] else "no",
            order == sorted(order)[::-1],
        )
    )
    facts, model = SKU_FACTS["H200"], decoder("Qwen3-1.7B")
    for context, paper_ms in TABLE_4.items():
        read = mean_read_tokens(Schedule(pages=(64,), bin_tokens=10**6), context, 1, model.num_layers)
        ours_ms = 1e3 * token_s(model, read, 8, facts.bandwidth_gb_s * 1e9, facts.bf16_tflops * 1e12)
        figures[f"ms at {context}"] = ours_ms
        rows.append(
            Row(
                f"token of 8 at {context:,} tokens, ms",
                f"{paper_ms:.2f}",
                f"at least {ours_ms:.2f}",
                ours_ms <= paper_ms,
            )
        )
    share, update = values["rollout_share"], values["update_share"]
    dense_end = 1 / (share / TABLE_2["Qwen3-4B"] + 1 - share)
    distilled = 1 / (share / TABLE_2["Qwen3-4B"] + 1 - share + values["distill_more"] * update)
    figures |= {"step": dense_end, "step with distillation": distilled}
    rows += [
        Row(
            "whole step of Qwen3-4B, times as fast",
            "2.11",
            f"{dense_end:.2f}",
            abs(dense_end / 2.11 - 1) < 0.1,
        ),
        Row("the same, with distillation", "-", f"{distilled:.2f}"),
    ]
    return Claim(
        "9. Sparrow: sparse decoding",
        "Sparrow, tables 2 and 4, appendix D",
        tuple(rows),
        notes=(
            "upper bounds: kernels, scheduling, sampling and prefill cost nothing here",
            "the speed-up of the rollout is the paper's in the rows of a whole step",
        ),
        assumptions=("sparse",),
        figures=figures,
    )
