"""Text to token ids and back: tokenizers, chat templates, detokenization, stop strings.

Knows nothing of requests, queues or gRPC. A fault in a caller's input is a ValueError subclass
defined here; the RPC layer maps the error to the request's field.
"""
