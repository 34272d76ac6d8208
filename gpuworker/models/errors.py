"""Errors that loading a model from disk raises."""


class WeightError(Exception):
    """A file, tensor or value is missing, damaged or of a wrong shape; the message names which."""


class UnsupportedModelError(Exception):
    """The model needs a feature that this worker does not have; the message names the feature."""
