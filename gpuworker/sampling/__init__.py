"""Chooses tokens from logits; a token depends only on its request's settings, seed, position."""
