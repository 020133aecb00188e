"""mu before a worker has run: the roofline's limits, and measured before given before estimated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echo_planes.config.schema import BUILTIN_MODELS
from echo_planes.errors import ModelError, nearest
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.fleet.throughput import (
    ENGINE_EFFICIENCY,
    LEARNER_EFFICIENCY,
    Answers,
    Throughput,
    estimated_t_train_s,
    estimated_tokens_per_s,
    mu_of_sku,
    size_of_folder,
    size_of_params,
)
from echo_planes.weights.tensor_files import load_tensors

H100 = SKU_FACTS["H100"]
SIZE = size_of_params(8e9, 131_072.0)
LONG = Answers(prompt_tokens=256, answer_tokens=4096, max_num_seqs=64)


def estimate(answers: Answers = LONG, memory_gib: float = 80.0, gpus: int = 1) -> float:
    rate = estimated_tokens_per_s(SIZE, answers, H100, memory_gib, gpus)
    assert rate is not None
    return rate


def test_a_step_reads_the_weights_once_and_each_sequences_cache() -> None:
    read_bytes = 2 * 8e9 + 64 * 131_072 * (256 + 4096 / 2)
    assert estimate() == pytest.approx(ENGINE_EFFICIENCY * 64 * 3350e9 / read_bytes)


def test_the_batch_is_what_the_memory_holds() -> None:
    # 0.85 x 24 GiB less 16 GB of weights leave 5.9 GB: 19 sequences of 302 MB.
    read_bytes = 2 * 8e9 + 19 * 131_072 * 2304
    assert estimate(memory_gib=24.0) == pytest.approx(ENGINE_EFFICIENCY * 19 * 3350e9 / read_bytes)


def test_a_model_that_does_not_fit_has_no_estimate_and_does_on_two_gpus() -> None:
    assert estimated_tokens_per_s(SIZE, LONG, H100, 16.0, 1) is None
    assert estimate(memory_gib=16.0, gpus=2) > 0


def test_a_large_batch_of_short_answers_is_bound_by_arithmetic() -> None:
    short = Answers(prompt_tokens=1, answer_tokens=16, max_num_seqs=4096)
    assert estimate(short) == pytest.approx(ENGINE_EFFICIENCY * H100.bf16_tflops * 1e12 / (2 * 8e9))


def test_more_bandwidth_is_more_throughput_in_proportion() -> None:
    faster = replace(H100, bandwidth_gb_s=2 * H100.bandwidth_gb_s)
    assert estimated_tokens_per_s(SIZE, LONG, faster, 80.0, 1) == pytest.approx(2 * estimate())


def test_measured_comes_before_given_before_estimated() -> None:
    assert mu_of_sku("A", {"A": 3.0}, {"A": 100.0}, 50.0, 10) == Throughput(3.0, "measured")
    assert mu_of_sku("A", {"B": 3.0}, {"A": 100.0}, 50.0, 10) == Throughput(10.0, "given")
    assert mu_of_sku("A", {"B": 3.0}, {}, 50.0, 10) == Throughput(5.0, "estimated")
    assert mu_of_sku("A", {}, {}, None, 10) is None


def test_a_folders_size_is_that_of_its_files() -> None:
    folder = BUILTIN_MODELS["builtin:tiny-math"]
    size = size_of_folder(folder)
    assert size.num_params == sum(t.bits.size for t in load_tensors(folder).values())
    assert size.kv_bytes_per_token == 2 * 4 * 2 * 32 * 2  # keys and values, layers, heads, dimension, bf16
    assert (size.weight_bytes, size.kv_source) == (2 * size.num_params, "given")


@pytest.mark.parametrize(
    "text", [None, "{", "[]", json.dumps({"num_hidden_layers": 4}), '{"text_config": 1}']
)
def test_a_folder_that_does_not_say_its_size_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="params_b=N"):
        size_of_folder(tmp_path)


def test_a_cache_that_is_not_given_is_an_estimate_through_the_usual_8b() -> None:
    assert size_of_params(8e9, None).kv_bytes_per_token == pytest.approx(131_072)
    assert size_of_params(32e9, None).kv_bytes_per_token == pytest.approx(262_144)
    assert size_of_params(8e9, None).kv_source == "estimated"
    assert size_of_params(8e9, 5.0).kv_source == "given"


def test_a_learner_step_takes_eight_operations_per_weight_and_token() -> None:
    seconds = estimated_t_train_s(1e9, 1e6, H100, 2)
    assert seconds == pytest.approx(8e15 / (LEARNER_EFFICIENCY * 2 * 989e12))


@pytest.mark.parametrize(("name", "said"), [("h100", "'H100'"), ("A100-80", "'A100-80GB'"), ("zzz", "")])
def test_the_nearest_sku_is_named(name: str, said: str) -> None:
    assert nearest(name, SKU_FACTS) == (f"; did you mean {said}?" if said else "")


def test_the_makers_figures_are_possible() -> None:
    for sku, facts in SKU_FACTS.items():
        assert 8 <= facts.memory_gib <= 512, sku
        assert 200 <= facts.bandwidth_gb_s <= 20_000, sku
        assert 20 <= facts.bf16_tflops <= 10_000, sku
        assert facts.source, sku
