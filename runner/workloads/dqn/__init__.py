"""Deep Q-learning, one part a file."""
