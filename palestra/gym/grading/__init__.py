"""What graders share: answers found in texts, and work that is done in child processes with a limit.

Begin at `children`.
"""
