"""Graders that run in child processes with a time limit. Begin at `grader_processes`."""
