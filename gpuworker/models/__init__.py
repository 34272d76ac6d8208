"""One lean decoder, the families it can be configured as, and weight loading."""
