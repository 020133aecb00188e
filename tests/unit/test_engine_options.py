"""Options that are passed on to vLLM: which, and why others are refused."""

from __future__ import annotations

import dataclasses

import pytest

from echo_planes.config.fleet import EXTRA_OPTIONS, EngineConfig
from echo_planes.errors import ConfigError
from echo_planes.loop.loading import load_config


def test_other_options_of_vllm_are_passed_on() -> None:
    config = load_config(["fleet.workers.0.engine.extra={max_num_batched_tokens: 8192, block_size: 32}"])
    assert config.fleet.workers[0].engine.extra == {"max_num_batched_tokens": 8192, "block_size": 32}


@pytest.mark.parametrize(
    "option",
    [
        *("{quantization: fp8}", "{kv_cache_dtype: fp8}", "{trust_remote_code: true}", "{seed: 1}"),
        *("{kv_offloading_size: 20}", "{kv_transfer_config: {}}", "{offload_group_size: 2}", "{revision: x}"),
    ],
)
def test_an_option_that_may_break_the_run_is_refused_by_name(option: str) -> None:
    with pytest.raises(
        ConfigError, match="known to leave weights and log-probabilities as they are"
    ) as caught:
        load_config([f"fleet.workers.0.engine.extra={option}"])
    assert "fleet.workers.0.engine.extra" in str(caught.value)
    assert option[1:].partition(":")[0] in str(caught.value)


@pytest.mark.parametrize("name", sorted(set(EngineConfig.model_fields) - {"extra"}))
def test_a_key_of_ours_is_named_instead(name: str) -> None:
    """Given twice, one of the two would be lost in silence."""
    with pytest.raises(ConfigError, match=f"set engine.{name}"):
        load_config([f"fleet.workers.0.engine.extra={{{name}: 1}}"])


def test_vllm_has_every_option_that_is_passed_on() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils").AsyncEngineArgs
    assert {field.name for field in dataclasses.fields(arguments)} >= EXTRA_OPTIONS
