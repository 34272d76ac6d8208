"""What the router decides: who is let in, in what order they go, and where to."""
