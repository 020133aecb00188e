"""Tasks: the interface to implement (`adapter`, `environment`), the registry of names, and the checks.

In: a task's name from the settings. Out: prompts, episodes, rewards. Rewards are computed in the process of
`reward_child`.
"""
