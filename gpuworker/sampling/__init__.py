"""Chooses tokens from logits: each by its own request's settings, seed and position alone."""
