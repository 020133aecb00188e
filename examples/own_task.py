"""Your own task in one class: answer `n+0=` with any number larger than n. Look at it, then train on it:

python -m echo_planes.task check examples.own_task:OwnTask  # on fakes, without an engine
python -m echo_planes.run task=examples.own_task:OwnTask task.limit=50
"""

import random
from typing import cast

from pydantic import Field

from echo_planes import Episode, Prompt, Reward, TaskAdapter, TaskOptions


class OwnOptions(TaskOptions):  # each field is a key of the command line; wrong names and types are refused
    limit: int = Field(default=100, ge=20, le=100, description="n is below this")


class OwnTask(TaskAdapter):
    Options = OwnOptions
    max_new_tokens = 4  # three digits and the end token

    def prompt(self, index: int) -> Prompt:  # from (seed, index) and nothing else; 7, 17, 27 ... are held out
        rest = [n for n in range(cast(OwnOptions, self.options).limit) if n % 10 != 7]
        return self.ask(index, random.Random(f"{self.seed}/{index}").choice(rest))

    def eval_prompt(self, index: int) -> Prompt:  # never trained, and the same whatever the seed
        held_out = range(7, cast(OwnOptions, self.options).limit, 10)
        return self.ask(index, held_out[index % len(held_out)])

    def reward(self, prompt: Prompt, episode: Episode) -> Reward:  # "stop": the policy ended it by itself
        is_number = episode.finish_reason == "stop" and episode.text in map(str, range(1000))
        correct = is_number and int(episode.text) > int(prompt.answer)
        return Reward(float(correct), correct, {"is_number": float(is_number)})

    def ask(self, index: int, n: int) -> Prompt:  # `answer` is what the reward needs, `text` is for people
        ids = self.tokenizer.encode(f"{n}+0=", add_special_tokens=False)
        return Prompt(index, tuple(ids), answer=str(n), text=f"{n}+0=")
