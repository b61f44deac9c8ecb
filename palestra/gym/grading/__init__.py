"""What graders share: finding answers in texts, and work in child processes with a time limit.

Begin at `grader_processes`.
"""
