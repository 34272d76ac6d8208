"""Text to token ids and back: tokenizers, chat templates, detokenization, stop strings.

Knows nothing of requests, queues or gRPC; a fault in what a caller sent is a ValueError subclass
defined here, which the shell maps to the field it concerns.
"""
