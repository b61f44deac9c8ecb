"""What can go wrong below a Fleet task."""


class BackendError(RuntimeError):
    """An instance could not be made, or is gone. Says nothing about the policy."""
