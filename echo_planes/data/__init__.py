"""The data plane: task adapters, prompts, the versioned replay buffer and its admission rules."""
