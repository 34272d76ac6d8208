"""What can be wrong with a model's text side, or with text that a caller sent."""


class UnsupportedTokenizerError(ValueError):
    """The model's tokenizer is of a kind that would not be served exactly."""


class ChatTemplateError(ValueError):
    """The messages do not fit the model's chat template, or it has none."""


class TextProcessError(RuntimeError):
    """A child process ended before it answered: mostly because it exceeded its limits."""
