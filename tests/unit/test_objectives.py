"""Each objective against a small case worked out in plain arithmetic."""

from __future__ import annotations

from math import exp
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch

from echo_planes.config.schema import ObjectiveConfig
from echo_planes.learning import objectives
from echo_planes.learning.objectives import OBJECTIVES, Loss, Tokens, outlier_masks, token_weights

Name = Literal["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo"]
NAMES: tuple[Name, ...] = get_args(Name)
PROXIMAL: tuple[Name, ...] = ("grpo", "dapo", "dr_grpo", "rloo", "gspo")  # may be decoupled
# Two trajectories, of one and of three trained tokens.
COUNTS = np.array([1, 3])
MAX_TOKENS = 10
NEW = [-1.0, -0.5, -2.0, -0.7]
OLD = [-1.1, -0.6, -1.8, -0.7]
SAMPLER = [-1.0, -0.9, -1.8, -2.7]
ADVANTAGE = [1.5, -0.5, -0.5, -0.5]


def make(config: ObjectiveConfig, new: list[float] = NEW, **changes: Any) -> tuple[torch.Tensor, Tokens]:
    logprobs = torch.tensor(new, requires_grad=True)
    trajectory = torch.tensor([0, 1, 1, 1])
    weights = torch.from_numpy(token_weights(OBJECTIVES[config.name], COUNTS, MAX_TOKENS))[trajectory]
    columns: dict[str, Any] = {
        "old_logprobs": torch.tensor(OLD),
        "sampler_logprobs": torch.tensor(SAMPLER),
        "advantages": torch.tensor(ADVANTAGE),
        "weights": weights,
        "trajectory": trajectory,
        "num_trajectories": 2,
    }
    return logprobs, Tokens(logprobs=logprobs, **(columns | changes))


def policy_loss(tokens: Tokens, config: ObjectiveConfig) -> Loss:
    return objectives.policy_loss(tokens, config, OBJECTIVES[config.name])


def proximal(name: Name = "grpo", **settings: Any) -> ObjectiveConfig:
    """The ratio against the start of the step, with no more than what a test asks for."""
    plain = {"clip_low": 0.2, "clip_high": 0.2, "clip_delta": 0.0}
    return ObjectiveConfig(name=name, anchor="proximal", **(plain | settings))


def loss_of(config: ObjectiveConfig, **changes: Any) -> Loss:
    return policy_loss(make(config, **changes)[1], config)


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("grpo", 1 / 2, 1 / 6),
        ("gspo", 1 / 2, 1 / 6),
        ("dapo", 1 / 4, 1 / 4),
        ("rloo", 1 / 4, 1 / 4),
        ("dr_grpo", 1 / 20, 1 / 20),
    ],
)
def test_token_weights(name: str, first: float, others: float) -> None:
    assert token_weights(OBJECTIVES[name], COUNTS, MAX_TOKENS) == pytest.approx([first, others])


def test_trajectories_without_trained_tokens_do_not_count() -> None:
    assert token_weights(OBJECTIVES["grpo"], np.array([2, 0]), MAX_TOKENS)[0] == pytest.approx(1 / 2)


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "dr_grpo"])
def test_per_token_loss_by_hand(name: Name) -> None:
    config = proximal(name, clip_low=0.1, clip_high=0.08)
    # Ratios e^0.1, e^0.1, e^-0.2, 1. The first is clipped to 1.08 (A > 0); the second is not (A < 0, above);
    # the third is clipped to 0.9 (A < 0, below). Importance weights: e^-0.1, e^0.3, 1, and e^2 cut to 2.
    tokens = [
        -exp(-0.1) * 1.08 * 1.5,
        -exp(0.3) * exp(0.1) * -0.5,
        -1.0 * 0.9 * -0.5,
        -2.0 * 1.0 * -0.5,
    ]
    per_token = token_weights(OBJECTIVES[name], COUNTS, MAX_TOKENS)[[0, 1, 1, 1]]
    result = loss_of(config)
    assert result.loss.item() == pytest.approx(float(np.dot(per_token, tokens)), abs=1e-6)
    assert result.clipped.tolist() == [True, False, True, False]
    assert result.tis.tolist() == pytest.approx([exp(-0.1), exp(0.3), 1.0, 2.0])


def test_gspo_uses_one_ratio_per_trajectory() -> None:
    config = proximal("gspo", clip_low=0.02, clip_high=0.02, tis_level="none")
    # Trajectory 0: e^0.1, clipped to 1.02. Trajectory 1: e^((0.1 - 0.2 + 0) / 3) = 0.967, clipped to 0.98.
    expected = -(1 / 2) * 1.02 * 1.5 - (1 / 2) * 0.98 * -0.5
    assert loss_of(config).loss.item() == pytest.approx(expected, abs=1e-6)


def test_gspo_gradient_is_shared_by_the_trajectory() -> None:
    config = proximal("gspo", clip_low=1.0, clip_high=1.0, tis_level="none")
    logprobs, tokens = make(config)
    torch.autograd.backward(policy_loss(tokens, config).loss)
    # d/dlogp of -(1/2) s A with s = exp(mean of three log ratios) is -(1/2) s A / 3 for every token.
    expected = -(1 / 2) * exp(-0.1 / 3) * -0.5 / 3
    assert logprobs.grad is not None
    assert logprobs.grad[1:].tolist() == pytest.approx([expected] * 3)


def test_second_side_clip_only_where_the_advantage_is_negative() -> None:
    config = proximal("dapo", clip_high=9.0, clip_delta=1.05, tis_level="none")
    new = [OLD[0] + 1.0, OLD[1] + 1.0, OLD[2], OLD[3]]
    result = loss_of(config, new=new)
    expected = [-exp(1.0) * 1.5, 1.05 * 0.5, 0.5, 0.5]
    assert result.loss.item() == pytest.approx(sum(expected) / 4)
    assert result.clipped.tolist() == [False, True, False, False]
    unbounded = loss_of(config.model_copy(update={"clip_delta": 0.0}), new=new)
    assert unbounded.loss.item() == pytest.approx((-exp(1.0) * 1.5 + exp(1.0) * 0.5 + 1.0) / 4)


def test_sequence_level_importance_weight_is_the_truncated_product() -> None:
    result = loss_of(proximal(tis_level="sequence", tis_cap=9.0))
    # Differences old - sampler: -0.1 | 0.3, 0, 2.
    assert result.tis.tolist() == pytest.approx([exp(-0.1)] + [9.0] * 3)
    untruncated = loss_of(proximal(tis_level="sequence", tis_cap=99.0))
    assert untruncated.tis.tolist() == pytest.approx([exp(-0.1)] + [exp(2.3)] * 3, rel=1e-5)


def test_kl_to_the_reference_by_hand() -> None:
    reference = torch.tensor([-1.0, -0.2, -2.0, -0.7])
    config = proximal("dapo", kl_beta=0.4)
    with_kl = loss_of(config, reference_logprobs=reference)
    without = loss_of(proximal("dapo"))
    assert with_kl.kl.tolist() == pytest.approx([0.0, exp(0.3) - 0.3 - 1.0, 0.0, 0.0], abs=1e-6)
    difference = with_kl.loss.item() - without.loss.item()
    # ECHO-2 eq. 24: the importance weight e^(-0.6 + 0.9) multiplies the KL term too.
    assert difference == pytest.approx(exp(0.3) * 0.4 * (exp(0.3) - 1.3) / 4, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", -0.3, 1.0), ("k2", 0.045, -0.3), ("k3", exp(0.3) - 1.3, 1.0 - exp(0.3))],
)
def test_kl_estimators_by_hand(estimator: Literal["k1", "k2", "k3"], value: float, gradient: float) -> None:
    # log(pi / pi_reference) is -0.3 at the second token and 0 elsewhere.
    config = proximal("dapo", kl_beta=1.0, kl_estimator=estimator)
    reference = torch.tensor([-1.0, -0.2, -2.0, -0.7])
    logprobs, tokens = make(config, reference_logprobs=reference)
    result = policy_loss(tokens, config)
    torch.autograd.backward(result.loss)
    assert result.kl[1].item() == pytest.approx(value, abs=1e-6)
    alone, plain = make(config)
    torch.autograd.backward(policy_loss(plain, config).loss)
    assert logprobs.grad is not None
    assert alone.grad is not None
    assert (logprobs.grad - alone.grad)[1].item() == pytest.approx(exp(0.3) * gradient / 4, abs=1e-6)


def test_the_kl_of_a_token_that_went_far_is_clamped() -> None:
    far = torch.tensor([-1.0, 29.5, -2.0, -0.7])  # 30 nats away: exp(30) unclamped
    config = proximal("dapo", kl_beta=1.0)
    logprobs, tokens = make(config, reference_logprobs=far)
    result = policy_loss(tokens, config)
    torch.autograd.backward(result.loss)
    assert result.kl.max().item() == pytest.approx(exp(10) - 11, rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad.abs().max() < 10


def test_against_the_sampler_the_clip_holds_for_stale_tokens() -> None:
    # One update a step: new = old, so a ratio against the start of the step is 1 and nothing is clipped.
    stale = [-1.0, -0.9, -1.0, -2.7]
    drifted = {"new": OLD, "sampler_logprobs": torch.tensor(stale)}
    assert not loss_of(proximal(), **drifted).clipped.any()
    config = ObjectiveConfig(anchor="sampler", clip_low=0.2, clip_high=0.2, clip_delta=0.0)
    result = loss_of(config, **drifted)
    # Ratios e^-0.1, e^0.3, e^-0.8, e^2, advantages +, -, -, -: the third has moved further than it may.
    assert result.clipped.tolist() == [False, False, True, False]
    expected = [-exp(-0.1) * 1.5, exp(0.3) * 0.5, 0.8 * 0.5, exp(2.0) * 0.5]
    per_token = token_weights(OBJECTIVES["grpo"], COUNTS, MAX_TOKENS)[[0, 1, 1, 1]]
    assert result.loss.item() == pytest.approx(float(np.dot(per_token, expected)), abs=1e-5)
    bounded = loss_of(
        ObjectiveConfig(anchor="sampler", clip_low=0.2, clip_high=0.2, clip_delta=4.0), **drifted
    )
    assert bounded.clipped.tolist() == [False, False, True, True]


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    config = ObjectiveConfig(name="cispo")
    logprobs, tokens = make(config)
    result = policy_loss(tokens, config)
    torch.autograd.backward(result.loss)
    # Ratios against the sampler 1, e^0.4, e^-0.2, e^2, cut at 1.2; every token has weight 1/4.
    weights = [1.0, 1.2, exp(-0.2), 1.2]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [-w * a / 4 for w, a in zip(weights, ADVANTAGE, strict=True)]
    )
    assert not result.clipped.any()
    assert result.tis.tolist() == pytest.approx(weights)
    assert result.truncated.tolist() == [False, True, False, True]


def test_a_weight_that_nothing_cuts_is_not_counted() -> None:
    uncut = loss_of(ObjectiveConfig(anchor="sampler"))  # the last token's ratio is e^2
    assert (uncut.tis.tolist(), uncut.truncated.any().item()) == ([1.0] * 4, False)
    with_kl = ObjectiveConfig(anchor="sampler", kl_beta=0.1)  # the KL's weight is cut
    cut = loss_of(with_kl, reference_logprobs=torch.tensor(OLD))
    assert cut.truncated.tolist() == [False, False, False, True]


def test_masks_leave_tokens_and_answers_out() -> None:
    # Old against sampler: e^-0.1 | e^0.3, 1, e^2; geometric means e^-0.1 and e^0.77.
    by_token = loss_of(ObjectiveConfig(token_mask=(0.5, 2.0)))
    assert by_token.masked.tolist() == [False, False, False, True]
    by_answer = loss_of(ObjectiveConfig(sequence_mask=(0.8, 1.25)))
    assert by_answer.masked.tolist() == [False, True, True, True]
    logprobs, tokens = make(config := ObjectiveConfig(sequence_mask=(0.8, 1.25)))
    torch.autograd.backward(policy_loss(tokens, config).loss)
    assert logprobs.grad is not None
    assert logprobs.grad[1:].tolist() == [0.0, 0.0, 0.0]
    assert logprobs.grad[0] != 0


def test_the_guard_masks_at_the_level_of_the_objective() -> None:
    assert set(outlier_masks(ObjectiveConfig())) == {"token_mask"}
    assert set(outlier_masks(ObjectiveConfig(name="gspo"))) == {"sequence_mask"}
    own = ObjectiveConfig(token_mask=(0.9, 1.1))
    assert outlier_masks(own) == {"token_mask": (0.9, 1.1)}


def test_the_importance_weight_has_the_level_of_the_objective() -> None:
    token = loss_of(ObjectiveConfig(anchor="proximal", tis_cap=99.0))
    assert token.tis.tolist() == pytest.approx([exp(-0.1), exp(0.3), 1.0, exp(2.0)])
    answer = loss_of(ObjectiveConfig(name="gspo", anchor="proximal", tis_cap=99.0))
    assert answer.tis.tolist() == pytest.approx([exp(-0.1)] + [exp(2.3 / 3)] * 3)


def test_each_objective_has_its_own_clip() -> None:
    # A mean log ratio of 0.001 is beyond GSPO's end within a step, and within GRPO's.
    near = {"new": [x + 0.001 for x in OLD], "advantages": torch.ones(4)}
    assert loss_of(ObjectiveConfig(name="gspo", anchor="proximal"), **near).clipped.all()
    assert not loss_of(ObjectiveConfig(name="grpo", anchor="proximal"), **near).clipped.any()


def test_every_name_of_the_settings_is_registered() -> None:
    assert all(ObjectiveConfig(name=name).name == name for name in OBJECTIVES)
    assert all(name == one.name for name, one in OBJECTIVES.items())


def test_on_policy_gradient_is_the_weighted_advantage() -> None:
    config = proximal("dapo", tis_level="none")
    logprobs, tokens = make(config)
    own = Tokens(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        sampler_logprobs=tokens.sampler_logprobs,
        advantages=tokens.advantages,
        weights=tokens.weights,
        trajectory=tokens.trajectory,
        num_trajectories=2,
    )
    torch.autograd.backward(policy_loss(own, config).loss)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-a / 4 for a in ADVANTAGE])


@pytest.mark.parametrize(
    "config",
    [ObjectiveConfig(name=name, anchor="sampler", kl_beta=0.1, sequence_mask=(0.5, 2.0)) for name in NAMES]
    + [proximal(name, tis_level=level, kl_beta=0.1) for name in PROXIMAL for level in ("token", "sequence")],
    ids=lambda config: f"{config.name}-{config.anchor}-{config.tis_level}",
)
def test_splitting_the_batch_does_not_change_the_gradient(config: ObjectiveConfig) -> None:
    name = config.name
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 1, 5, 2, 4])
    trajectory = torch.arange(5).repeat_interleave(counts)
    size = int(counts.sum())
    new, old, sampler, reference = (-torch.rand(4, size, generator=generator)).unbind()
    advantages = torch.randn(5, generator=generator)[trajectory]
    weights = torch.from_numpy(token_weights(OBJECTIVES[name], counts.numpy(), MAX_TOKENS))[trajectory]

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        leaf = new.clone().requires_grad_()
        for part in parts:
            at = torch.isin(trajectory, torch.tensor(part)).nonzero().squeeze(1)
            tokens = Tokens(
                logprobs=leaf[at],
                old_logprobs=old[at],
                sampler_logprobs=sampler[at],
                advantages=advantages[at],
                weights=weights[at],
                trajectory=trajectory[at],
                num_trajectories=5,
                reference_logprobs=reference[at],
            )
            torch.autograd.backward(policy_loss(tokens, config).loss)
        assert leaf.grad is not None
        return leaf.grad

    whole = gradient([[0, 1, 2, 3, 4]])
    assert whole.abs().max() > 0
    torch.testing.assert_close(gradient([[0, 3], [1], [2, 4]]), whole)
