"""Quiz: short questions that a small chat model half knows, generated without end."""
