"""Where the scripts look for their entry points; the work is in palestra itself."""

from palestra.cli.gym.ng.commands import by_old_name, gym

__all__ = ["by_old_name", "gym"]
