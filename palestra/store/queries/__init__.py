"""Queries, a module for each kind of row: functions that take a `Connection`."""
