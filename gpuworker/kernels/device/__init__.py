"""Device code: Triton functions only; their wrappers are one package up."""
