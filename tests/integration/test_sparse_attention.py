"""Sparse decoding on a real vLLM engine, held to stock attention and to a choice of pages by brute force."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.sparse_reference import Reference
from echo_planes.config.fleet import EngineConfig
from echo_planes.config.kv_schedule import Schedule
from echo_planes.config.schema import SamplingConfig
from echo_planes.config.sparse import SparseConfig
from echo_planes.errors import ConfigError, RunError, WeightsError
from echo_planes.learning.distillation import Distiller, SparseRows
from echo_planes.learning.policy_model import load_policy
from echo_planes.rollout.sparsity.acceptance import Audit, audit_fault
from echo_planes.rollout.vllm.sparse_engine import SparseEngine
from echo_planes.types import Draw, Sample, Span
from echo_planes.weights.digest import bit_tensor
from echo_planes.weights.sparse_adapter import SparseAdapter
from tests.thorough import takes_minutes
from tests.unit.test_receiver import publication

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

VOCABULARY = 259
GREEDY = Draw(0.0, 1.0)


class Bench:
    """One engine, on an event loop of its own, with pages of so many tokens and a tight schedule."""

    def __init__(self, folder: Path, size: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.full = Schedule(pages=(10_000,), page_tokens=size, dense_layers=0)
        pages = (5, 7) if size == 16 else (4, 5)
        self.short = Schedule(pages=pages, page_tokens=size, bin_tokens=200, dense_layers=1)
        # A cache of about 3,000 tokens, and prompts in chunks of 96: blocks change hands.
        self.engine = SparseEngine(
            EngineConfig(
                dtype="float32",
                kv_cache_gib=0.0045,
                max_num_seqs=8,
                extra={"max_num_batched_tokens": 96},
            ),
            SamplingConfig(temperature=1.0, top_p=1.0, top_logprobs=20),
            folder,
            640,
            0,
            page_tokens=size,
        )
        self.run(self.engine.start())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def answers(
        self,
        prompts: Sequence[Sequence[int]],
        schedule: Schedule | None,
        tokens: int,
        draw: Draw | None = GREEDY,
    ) -> list[Sample]:
        """Answers to all prompts together."""

        async def together() -> list[Sample]:
            await self.engine.set_schedule(schedule)
            found = await asyncio.gather(
                *(
                    self.engine.generate(
                        prompt, num_samples=1, max_new_tokens=tokens, on_tokens=lambda *_: None, draw=draw
                    )
                    for prompt in prompts
                )
            )
            return [samples[0] for samples in found]

        return list(self.run(together()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three layers, whose groups of two heads share keys, and whose queries are strided."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=VOCABULARY - 1,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[16, 32])
def bench(folder: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(folder, request.param)
    yield made
    made.run(made.engine.close())
    made.loop.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCABULARY - 1) for _ in range(rng.randrange(3, 330))] for _ in range(12)]


def test_a_full_budget_is_stock_attention(bench: Bench, prompts: list[list[int]]) -> None:
    dense = bench.answers(prompts, None, 200)
    full = bench.answers(prompts, bench.full, 200)
    assert [one.token_ids for one in full] == [one.token_ids for one in dense]
    pairs = [
        (p, q)
        for one, two in zip(dense, full, strict=True)
        for p, q in zip(one.logprobs, two.logprobs, strict=True)
    ]
    assert len(pairs) > 500
    assert max(abs(p - q) for p, q in pairs) <= 1e-4


def test_the_pages_read_are_those_of_a_choice_by_brute_force(
    bench: Bench, folder: Path, prompts: list[list[int]]
) -> None:
    answers = bench.answers(prompts, bench.short, 120, None)

    def agreeing(reference: Reference) -> int:
        """Answers whose tokens all have the reference's log-probabilities."""
        count = 0
        for prompt, sample in zip(prompts, answers, strict=True):
            expected = reference.logprobs(prompt, sample.token_ids, bench.short)
            mine = expected[torch.arange(len(sample.token_ids)), torch.tensor(sample.token_ids)]
            count += bool((mine - torch.tensor(sample.logprobs)).abs().max() < 1e-3)
        return count

    best, recent = Reference(folder), Reference(folder, recent=True)
    # Rounding may decide between two pages of almost the same score, which another answer then shows.
    assert agreeing(best) >= len(prompts) - 1
    assert best.rows > 1000
    assert agreeing(recent) <= len(prompts) / 2


def test_an_audit_bounds_the_acceptance_of_every_token(
    bench: Bench, folder: Path, prompts: list[list[int]]
) -> None:
    reference, alphas, widths = Reference(folder), [], []
    for prompt, sample in zip(prompts, bench.answers(prompts, bench.short, 60, None), strict=True):
        bounds = bench.run(bench.engine.audit(prompt, sample))
        dense, sparse = (
            reference.logprobs(prompt, sample.token_ids, one).exp() for one in (None, bench.short)
        )
        exact = torch.minimum(dense, sparse).sum(-1).tolist()
        assert len(bounds) == len(exact) == len(sample.token_ids)
        for one, alpha in zip(bounds, exact, strict=True):
            assert one.lower - 1e-3 <= alpha <= one.upper + 1e-3
        alphas += exact
        widths += [one.upper - one.lower for one in bounds]
    assert len(alphas) > 100
    assert min(alphas) < 0.9
    assert np.median(widths) < 0.6


def test_a_schedule_of_another_page_size_is_refused(bench: Bench) -> None:
    other = Schedule(pages=(8,), page_tokens=48 - bench.full.page_tokens)
    with pytest.raises(ConfigError, match="its pages have"):
        bench.run(bench.engine.set_schedule(other))


def test_options_that_do_not_go_with_it_are_one_line(folder: Path) -> None:
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, top_logprobs=20)
    for config, why in (
        (EngineConfig(extra={"block_size": 32}), "block_size"),
        (EngineConfig(enable_prefix_caching=True), "enable_prefix_caching"),
    ):
        with pytest.raises(ConfigError, match=why):
            SparseEngine(config, sampling, folder, 640, 0)
    with pytest.raises(ConfigError, match="page_tokens=48"):
        SparseEngine(EngineConfig(), sampling, folder, 640, 0, page_tokens=48)
    for odd in (SamplingConfig(temperature=0.8, top_logprobs=20), SamplingConfig(top_logprobs=0)):
        engine = SparseEngine(EngineConfig(), odd, folder, 640, 0)
        with pytest.raises(ConfigError, match="audit"):
            asyncio.run(engine.audit([1], Sample((1,), (0.0,), (Span(0, 1, -1, ""),), "stop")))


def test_an_answer_of_another_version_is_not_audited(bench: Bench) -> None:
    with pytest.raises(RunError, match="versions"):
        bench.run(bench.engine.audit([1], Sample((1,), (0.0,), (Span(0, 1, 5, ""),), "stop")))


def test_an_answer_that_fills_the_models_length_is_audited(bench: Bench) -> None:
    prompt = [7] * 637
    (sample,) = bench.answers([prompt], None, 3, None)
    bounds = bench.run(bench.engine.audit(prompt, sample))
    assert len(bounds) == len(sample.token_ids)
    assert all(one.upper >= 0.999 for one in bounds)


async def several(
    engine: SparseEngine, prompts: Sequence[Sequence[int]], tokens: int, draw: Draw | None
) -> list[Sample]:
    found = await asyncio.gather(
        *(
            engine.generate(one, num_samples=1, max_new_tokens=tokens, on_tokens=lambda *_: None, draw=draw)
            for one in prompts
        )
    )
    return [samples[0] for samples in found]


def test_preempted_answers_and_an_install_midway_are_stock_too(folder: Path) -> None:
    """Four prompts fit the cache, and their whole answers do not: some must be preempted.

    The weights that come midway are the same ones, so nothing may change but the version of the tokens.
    """
    state = {name: bit_tensor(one) for name, one in load_file(folder / "model.safetensors").items()}
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCABULARY - 1) for _ in range(300)] for _ in range(6)]
    full = Schedule(pages=(10_000,), number=4, dense_layers=0)

    async def main() -> tuple[list[Sample], list[Sample]]:
        engine = SparseEngine(
            EngineConfig(dtype="float32", kv_cache_gib=0.0023, max_num_seqs=8),
            SamplingConfig(top_logprobs=20),
            folder,
            640,
            0,
        )
        await engine.start()
        dense = await several(engine, prompts, 200, GREEDY)
        await engine.set_schedule(full)
        work = asyncio.ensure_future(several(engine, prompts, 200, GREEDY))
        await asyncio.sleep(0)
        while not engine.vllm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.001)
        await engine.install(publication(0, state))
        sparse = await work
        await engine.close()
        return dense, sparse

    dense, sparse = asyncio.run(main())
    assert [one.token_ids for one in sparse] == [one.token_ids for one in dense]
    versions = {span.version for one in sparse for span in one.spans}
    assert 0 in versions
    assert {span.schedule for one in sparse for span in one.spans} == {4}
    assert {span.schedule for one in dense for span in one.spans} == {-1}


def test_a_dense_request_among_sparse_ones_is_dense(bench: Bench, prompts: list[list[int]]) -> None:
    dense = bench.answers(prompts, None, 120)

    async def mixed() -> tuple[list[Sample], list[Sample]]:
        await bench.engine.set_schedule(replace(bench.short, number=8))
        plain, asked = await asyncio.gather(
            several(bench.engine, prompts, 120, GREEDY),
            several(bench.engine, prompts, 120, replace(GREEDY, dense=True)),
        )
        await bench.engine.set_schedule(None)
        return plain, asked

    plain, asked = bench.run(mixed())
    assert [one.token_ids for one in asked] == [one.token_ids for one in dense]
    pairs = zip(asked, dense, strict=True)
    apart = [abs(p - q) for one, two in pairs for p, q in zip(one.logprobs, two.logprobs, strict=True)]
    assert max(apart) <= 1e-4  # so evaluations and their mismatch are those of a dense run
    assert [one.token_ids for one in plain] != [one.token_ids for one in dense]
    assert {span.schedule for one in asked for span in one.spans} == {-1}
    assert {span.schedule for one in plain for span in one.spans} == {8}


def test_a_share_of_the_answers_is_audited_by_itself(folder: Path, prompts: list[list[int]]) -> None:
    schedule = Schedule(pages=(5,), number=3, dense_layers=1)

    async def main() -> tuple[list[Audit], list[Audit], list[Sample]]:
        engine = SparseEngine(
            EngineConfig(kv_cache_gib=0.02),
            SamplingConfig(top_logprobs=20),
            folder,
            640,
            0,
            audit_share=1.0,
        )
        await engine.start()
        await several(engine, prompts, 30, None)  # dense still: nothing to compare
        before = engine.take_audits()
        await engine.set_schedule(schedule)
        await several(engine, prompts, 30, replace(GREEDY, dense=True))  # an evaluation
        drawn = await several(engine, prompts, 30, None)
        audits: list[Audit] = []
        async with asyncio.timeout(60):
            while len(audits) < sum(len(sample.token_ids) > 1 for sample in drawn):
                audits += engine.take_audits()
                await asyncio.sleep(0.02)
        await engine.close()
        return before, audits, drawn

    before, audits, drawn = asyncio.run(main())
    assert before == []
    assert sorted((one.context_tokens, len(one.alphas)) for one in audits) == sorted(
        (len(prompt), len(sample.token_ids) - 1)  # a first token is dense
        for prompt, sample in zip(prompts, drawn, strict=True)
        if len(sample.token_ids) > 1
    )
    assert {one.schedule for one in audits} == {3}
    assert not any(map(audit_fault, audits))
    assert max(one.drift for one in audits) > 0.01


def adapted(folder: Path, seed: int = 0, scale: float = 0.02) -> tuple[Distiller, SparseAdapter]:
    """An adapter that does something, with the values that bf16 has."""
    distiller = Distiller(
        load_policy(folder, torch.float32, 1.0, 1.0), SparseConfig(distill_rank=4), seed, 0, 1
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for a, b in distiller.pairs.values():
            a.copy_(a.bfloat16())
            b.copy_((scale * torch.randn(b.shape, generator=generator)).bfloat16())
    return distiller, SparseAdapter.of(1, distiller.pairs)


def test_the_learners_sparse_forward_is_the_engines(
    bench: Bench, folder: Path, prompts: list[list[int]]
) -> None:
    """Prompts in chunks, several lengths, a first bin that is dense; before the adapter and with it."""
    schedule = replace(bench.short, pages=(0, *bench.short.pages), bin_tokens=100, number=11)
    distiller, adapter = adapted(folder)

    async def drawn() -> list[list[Sample]]:
        await bench.engine.set_schedule(schedule)
        found = [await several(bench.engine, prompts, 60, None)]
        await bench.engine.set_adapter(adapter)
        await bench.engine.set_adapter(replace(adapter, version=0, tensors=adapted(folder, 1)[1].tensors))
        found.append(await several(bench.engine, prompts, 60, None))
        found.append(await several(bench.engine, prompts, 60, replace(GREEDY, dense=True)))
        await bench.engine.set_schedule(None)
        found.append(await several(bench.engine, prompts, 60, GREEDY))
        return found

    before, after, asked_dense, dense = bench.run(drawn())

    def apart(samples: list[Sample], *, is_on: bool) -> list[float]:
        worst = []
        for prompt, sample in zip(prompts, samples, strict=True):
            decoded = np.arange(len(prompt) + len(sample.token_ids) - 1) >= len(prompt)
            rows = SparseRows.of(schedule, decoded, torch.device("cpu"))
            rows = rows if is_on else replace(rows, adapted=rows.adapted[:0])
            predictors = torch.arange(len(prompt) - 1, len(decoded))
            ids = torch.tensor([*prompt, *sample.token_ids])
            with torch.no_grad(), distiller.sparse(rows):
                hidden = distiller.hidden(ids[:-1], predictors)
                logprobs = distiller.policy.head(hidden, ids[len(prompt) :])[0]
            worst.append(float((logprobs - torch.tensor(sample.logprobs)).abs().max()))
        return worst

    # In one answer two pages' scores may be so near that rounding decides between them.
    for samples, is_on in ((before, False), (after, True)):
        assert sum(worst < 1e-3 for worst in apart(samples, is_on=is_on)) >= len(prompts) - 1
    assert max(apart(after, is_on=False)) > 1e-2
    assert [one.token_ids for one in asked_dense] == [one.token_ids for one in dense]


def test_an_adapter_of_another_model_is_refused(bench: Bench) -> None:
    for tensors in (
        {"model.layers.0.self_attn.q_proj": (torch.ones(2, 8), torch.ones(8, 2))},
        {"other": (torch.ones(2, 8), torch.ones(8, 2))},
    ):
        with pytest.raises((WeightsError, RunError), match="sparse adapter"):
            bench.run(bench.engine.set_adapter(SparseAdapter.of(9, tensors)))


def test_of_two_schedules_the_later_number_stays(bench: Bench) -> None:
    bench.run(bench.engine.set_schedule(replace(bench.short, number=9)))
    bench.run(bench.engine.set_schedule(replace(bench.full, number=8)))
    (sample,) = bench.run(several(bench.engine, [[1, 2, 3]], 4, None))
    assert {span.schedule for span in sample.spans} == {9}
    bench.run(bench.engine.set_schedule(None))


@takes_minutes
def test_two_ranks_with_a_full_budget_are_stock(folder: Path, prompts: list[list[int]]) -> None:
    async def main() -> tuple[list[Sample], list[Sample], list[Sample]]:
        engine = SparseEngine(
            EngineConfig(kv_cache_gib=0.02, tensor_parallel_size=2), SamplingConfig(), folder, 640, 0
        )
        await engine.start()
        dense = await several(engine, prompts, 100, GREEDY)
        await engine.set_schedule(Schedule(pages=(10_000,), dense_layers=0))
        full = await several(engine, prompts, 100, GREEDY)
        await engine.set_schedule(Schedule(pages=(4,), number=1, dense_layers=0))
        few = await several(engine, prompts, 100, GREEDY)
        await engine.close()
        return dense, full, few

    dense, full, few = asyncio.run(main())
    assert [one.token_ids for one in full] == [one.token_ids for one in dense]
    assert [one.token_ids for one in few] != [one.token_ids for one in dense]


@takes_minutes
def test_two_ranks_share_an_adapter(folder: Path, prompts: list[list[int]]) -> None:
    """Each has a share of B's outputs or of A's inputs; beside one rank, in bf16, by the first tokens."""
    schedule = Schedule(pages=(4,), dense_layers=0)

    async def first(ranks: int) -> list[list[float]]:
        engine = SparseEngine(
            EngineConfig(kv_cache_gib=0.02, tensor_parallel_size=ranks), SamplingConfig(), folder, 640, 0
        )
        await engine.start()
        await engine.set_schedule(schedule)
        found = [await several(engine, prompts, 1, GREEDY)]
        await engine.set_adapter(adapted(folder, scale=0.2)[1])
        found.append(await several(engine, prompts, 1, GREEDY))
        await engine.close()
        return [[sample.logprobs[0] for sample in samples] for samples in found]

    (plain, one), (_, two) = asyncio.run(first(1)), asyncio.run(first(2))
    assert np.abs(np.array(one) - two).mean() < 0.2 * np.abs(np.array(one) - plain).mean()
