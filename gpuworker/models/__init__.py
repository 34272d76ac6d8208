"""The decoder, the model families that configure the decoder, and weight loading."""
