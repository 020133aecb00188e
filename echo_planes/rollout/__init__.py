"""The rollout plane: workers that pull leases, sample with vLLM and score the answers."""
