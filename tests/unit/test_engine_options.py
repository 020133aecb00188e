"""Options that are passed on to vLLM: which, and why others are refused."""

from __future__ import annotations

import pytest

from echo_planes.config.fleet import REFUSED_OPTIONS, EngineConfig
from echo_planes.errors import ConfigError
from echo_planes.loop.loading import load_config


def test_other_options_of_vllm_are_passed_on() -> None:
    config = load_config(["fleet.workers.0.engine.extra={max_num_batched_tokens: 8192, block_size: 32}"])
    assert config.fleet.workers[0].engine.extra == {"max_num_batched_tokens": 8192, "block_size": 32}


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("{quantization: fp8}", "published weights would not be what the engine computes with"),
        (
            "{kv_cache_dtype: fp8}",
            "the engine would sample from another distribution than the learner trains",
        ),
        ("{trust_remote_code: true}", "it would run code from the model folder"),
        ("{dtype: float32}", "set engine.dtype instead"),
        ("{max_model_len: 99}", "set model.max_model_len instead"),
        ("{seed: 1}", "it is chosen by the run"),
    ],
)
def test_an_option_that_would_break_the_run_is_refused_by_name(option: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load_config([f"fleet.workers.0.engine.extra={option}"])
    assert "fleet.workers.0.engine.extra" in str(caught.value)
    assert option[1:].partition(":")[0] in str(caught.value)


def test_every_key_of_an_engine_that_vllm_has_too_is_refused() -> None:
    """Given twice, one of the two would be lost in silence."""
    own = set(EngineConfig.model_fields) - {"extra", "kv_cache_gib"}
    assert own <= set(REFUSED_OPTIONS)
