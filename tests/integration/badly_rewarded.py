"""A task whose rewards go wrong in every way, by what the answer says. Used in processes of their own."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any, cast

import numpy as np

from echo_planes.data.tasks.adapter import TaskAdapter, TaskOptions
from echo_planes.tasks.math.adapter import MathTask
from echo_planes.types import Episode, Prompt, Reward

FOUND: dict[str, Any] = {
    "nan": Reward(math.nan, False),
    "infinity": Reward(math.inf, True),
    "text": Reward(cast(float, "1"), True),
    "bool": Reward(True, True),
    "correct": Reward(1.0, cast(bool, "yes")),
    "parts": Reward(1.0, True, {"length": math.nan}),
    "none": None,
    "half": 0.5,
    "numpy": Reward(
        cast(float, np.float32(0.5)), cast(bool, np.bool_(True)), {"half": cast(float, np.int64(2))}
    ),
}


class BadlyRewarded(TaskAdapter):
    """The answer names what its reward does."""

    reward_limit_s = 5.0

    def __init__(self, options: TaskOptions, tokenizer: Any, seed: int) -> None:
        super().__init__(options, tokenizer, seed)
        if seed < 0:
            raise ValueError("no such seed")

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (1, 2))

    def eval_prompt(self, index: int) -> Prompt:
        return Prompt(-index, (1, 2))

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        match episode.text:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise ZeroDivisionError("no samples to divide by")
            case "linger":
                if os.fork() == 0:
                    time.sleep(3600)
                    os._exit(0)
                time.sleep(3600)
            case "number":
                return Reward(float(episode.response_ids[0]), True)
            case "exit":
                os._exit(7)
            case "print":
                print("this is no answer", file=sys.__stdout__, flush=True)
                print(input("nor is there a question"))
            case "whole":
                same = prompt.token_ids == (1, 2) and len(episode.spans) == len(episode.response_ids) == 2
                return Reward(float(os.getpid()), same and episode.top_logprobs == (((5, -0.5),), ()))
        return cast(Reward, FOUND.get(episode.text, Reward(0.25, True, {"a": 1.0})))


class SometimesBadlyRewarded(MathTask):
    """Addition, where the rewards of some prompts go wrong."""

    reward_limit_s = 2.0

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:
        match prompt.index % 40:
            case 3:
                time.sleep(3600)
            case 5:
                raise ZeroDivisionError("no samples to divide by")
            case 7:
                return Reward(math.nan, True)
        return super().reward(prompt, episode)
