"""Starts a gym's servers, keeps them running, and ends them. Begin at `supervisor`."""

from palestra.gym.supervisor.supervisor import Supervisor

__all__ = ["Supervisor"]
