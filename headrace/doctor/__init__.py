"""Checks a deployment from the outside: what is wrong, and what to do about each finding.

Nothing here needs full access: what a key does not open is reported as skipped.
"""
