"""Entry points of the scripts; the work is in palestra itself."""

from palestra.cli.gym.ng.commands import by_old_name, gym

__all__ = ["by_old_name", "gym"]
