"""What the router decides: admission, the order of dispatch, and placement."""
