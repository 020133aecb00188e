"""Programs judged by tests: generated one-line functions, HumanEval, MBPP."""
