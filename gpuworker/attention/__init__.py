"""Paged attention over one flat mixed batch, behind one interface."""
