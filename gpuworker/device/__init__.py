"""How a step's numbers reach a device and come back, and how launches are recorded."""
