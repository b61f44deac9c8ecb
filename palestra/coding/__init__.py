"""Coding tasks: an instruction, files to work on, and a verifier that judges what an agent made of them."""

from palestra.coding.environment import prepare, task_spec
from palestra.coding.errors import TaskError, VerifierError
from palestra.coding.gold import play_solution
from palestra.coding.reading import read_task, read_tasks
from palestra.coding.task import CodingTask, RewardPart, TaskLimits
from palestra.coding.verifier import CodingVerdict, diff, verify

__all__ = [
    "CodingTask",
    "CodingVerdict",
    "RewardPart",
    "TaskError",
    "TaskLimits",
    "VerifierError",
    "diff",
    "play_solution",
    "prepare",
    "read_task",
    "read_tasks",
    "task_spec",
    "verify",
]
