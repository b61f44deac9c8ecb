"""Starting a gym's servers, keeping them running, ending them. Begin at `supervisor`."""

from palestra.gym.supervisor.supervisor import Supervisor

__all__ = ["Supervisor"]
