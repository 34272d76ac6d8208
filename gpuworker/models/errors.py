"""What can be wrong with a model on disk."""


class WeightError(Exception):
    """A file or tensor that is missing, truncated or of another shape; the message names it."""


class UnsupportedModelError(Exception):
    """The model needs something that this worker does not have; the message says what."""
