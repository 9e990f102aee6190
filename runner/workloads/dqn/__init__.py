"""Deep Q-learning: the workload, its actor, replay buffer, n-step buffer and evaluation."""
