"""echo_planes: RL post-training for LLMs with learning in one place and rollouts wherever GPUs are cheap."""

__version__ = "0.1.0"
