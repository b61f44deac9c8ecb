"""Judges of an audit's episodes: each reads them and returns findings, and plays nothing."""
