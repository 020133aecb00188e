"""A step that is trained in parts makes the update of the whole batch: real DeepSpeed, one and two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.integration.test_learner import Arrays, run_together, settings, write_model
from tests.thorough import THOROUGH

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

STEPS = 3
EVEN, EMPTY_LAST = (2, 2, 2), (1, 4, 1)  # groups 2 and 5 have no gradient
WHOLE = (6,)


@dataclass(frozen=True)
class Run:
    """A learner whose steps come in parts of so many groups; one part: the whole step."""

    world_size: int
    zero_stage: int
    objective: str
    parts: tuple[int, ...]
    resumed: bool = False  # in its last step, after a learner that was killed between two parts of it

    @property
    def name(self) -> str:
        fields = (self.world_size, self.zero_stage, self.objective, *self.parts, self.resumed)
        return "-".join(map(str, fields))


STAGES = [(ranks, stage, "grpo") for ranks in (1, 2) for stage in (0, 1, 2, 3)]
SOME = [(1, 1, "grpo"), (2, 2, "grpo"), (2, 3, "grpo")]
OBJECTIVES = [(1, 1, "gspo"), (2, 2, "dr_grpo")]
KINDS = (STAGES if THOROUGH else SOME) + OBJECTIVES
PARTS = [EVEN, EMPTY_LAST]
KILLED = [(1, 1, "grpo"), (2, 2, "grpo")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Arrays]:
    """Of every kind: in parts, and whole. All in one process a rank."""
    model = write_model(tmp_path_factory.mktemp("model"))
    specs: dict[Run, dict[str, Any]] = {}
    for ranks, stage, objective in KINDS:
        for parts in (WHOLE, *PARTS):
            run = Run(ranks, stage, objective, parts)
            config = settings(model, stage, "fp32", objective={"name": objective, "clip_delta": None})
            specs[run] = {"config": config, "first_step": 0, "num_steps": STEPS}
            specs[run] |= {"gradient": True} if parts == WHOLE else {"parts": parts}
    for kind in KILLED:
        run, resumed = Run(*kind, EVEN), Run(*kind, EVEN, resumed=True)
        saved = str(tmp_path_factory.mktemp("saved"))
        specs[run] |= {"save_at": STEPS - 1, "save_to": saved}
        rest = {"first_step": STEPS - 1, "num_steps": 1, "load_from": saved, "killed": True}
        specs[resumed] = {"config": specs[run]["config"], "parts": EVEN, **rest}
    return run_together(tmp_path_factory.mktemp("parts"), specs)


def relative_difference(one: Arrays, other: Arrays, prefix: str) -> float:
    names = [name for name in one if name.startswith(prefix)]
    assert names
    differences = [np.linalg.norm(one[name] - other[name]) for name in names]
    return float(np.linalg.norm(differences) / np.linalg.norm([np.linalg.norm(one[name]) for name in names]))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_gradient_of_parts_is_that_of_the_whole_batch(
    found: dict[Run, Arrays], kind: tuple[int, int, str], parts: tuple[int, ...]
) -> None:
    whole, split = found[Run(*kind, WHOLE)], found[Run(*kind, parts)]
    assert relative_difference(whole, split, "gradient/") <= 1e-6
    np.testing.assert_allclose(split["grad_norm"], whole["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(split["loss"], whole["loss"], rtol=1e-4, atol=1e-6)
    assert split["num_updates"].tolist() == whole["num_updates"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", KILLED, ids=str)
def test_a_learner_killed_between_two_parts_resumes_to_the_same_weights(
    found: dict[Run, Arrays], kind: tuple[int, int, str]
) -> None:
    unbroken, resumed = found[Run(*kind, EVEN)], found[Run(*kind, EVEN, resumed=True)]
    names = [name for name in unbroken if name.startswith(("bits/", "fp32/"))]
    assert names
    for name in names:
        assert resumed[name].tobytes() == unbroken[name].tobytes(), name
