"""Tasks: the interface to write (`adapter`, `environment`), how one is found by name, and how it is checked.

In: a name of the settings. Out: prompts, episodes, rewards. Rewards are computed in `reward_child`'s
process.
"""
