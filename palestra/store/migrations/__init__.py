"""Alembic's scripts, run by `palestra/store/schema.py` whenever a store is opened.

A change of `tables.py` needs a new file in `versions/`; a test compares the two on both databases.
"""
