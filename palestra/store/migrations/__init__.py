"""Alembic's scripts, run by `palestra/store/schema.py` whenever a store opens.

A change of `tables.py` comes with the next file in `versions/`; a test compares the two on both databases.
"""
