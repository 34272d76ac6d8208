"""Errors in a model's tokenizer or chat template, or in text that a caller sent."""


class UnsupportedTokenizerError(ValueError):
    """The model's tokenizer is of a kind that cannot be reproduced exactly."""


class ChatTemplateError(ValueError):
    """The messages do not fit the model's chat template, or the model has no template."""


class TextProcessError(RuntimeError):
    """A child process ended before its answer, mostly because a limit was exceeded."""
