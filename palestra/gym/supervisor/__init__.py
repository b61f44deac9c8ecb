"""Starting a gym's servers, keeping them going, ending them."""

from palestra.gym.supervisor.supervisor import Supervisor

__all__ = ["Supervisor"]
