"""Gymnasium environments: their options, vectorized stepping, and saving their state."""
