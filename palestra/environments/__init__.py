"""Text environments: the interface, the registry, tasks and their order. Nothing here needs more than msgspec.

Begin at `text` and `registry`.
"""

from palestra.environments.environment_set import EnvironmentSet
from palestra.environments.errors import EnvironmentFailure, EnvironmentTimeout, TaskFileError, UnknownEnvironment
from palestra.environments.pictures import image_part
from palestra.environments.registry import EnvSpec, deregister, make, register, registry, spec
from palestra.environments.session import EnvSession, StepResult
from palestra.environments.task_order import TaskOrder
from palestra.environments.tasks import read_tasks
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput, ConversationType, Env, MessageType
from palestra.environments.tools import ToolGroup, tool

__all__ = [
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ConversationType",
    "Env",
    "EnvSession",
    "EnvSpec",
    "EnvironmentFailure",
    "EnvironmentSet",
    "EnvironmentTimeout",
    "MessageType",
    "StepResult",
    "TaskFileError",
    "TaskOrder",
    "ToolGroup",
    "UnknownEnvironment",
    "deregister",
    "image_part",
    "make",
    "read_tasks",
    "register",
    "registry",
    "spec",
    "tool",
]

for _name, _place in {
    "aime": "mathematics:Aime",
    "bfcl": "function_calls:Bfcl",
    "gsm8k": "gsm8k:Gsm8k",
    "humaneval": "programs:HumanEval",
    "ifeval": "instructions:IfEval",
    "math500": "mathematics:Math500",
    "mbpp": "programs:Mbpp",
}.items():
    register(_name, f"palestra.environments.benchmarks.{_place}")
register("answers", "palestra.environments.bundled.answers:Answers")
register("arithmetic", "palestra.environments.bundled.arithmetic:Arithmetic")
register("drawings", "palestra.environments.bundled.drawings.environment:Drawings")
register("fleet_task", "palestra.environments.fleet:FleetTaskEnv")
register("fleet", "palestra.environments.fleet:FleetTaskEnv")  # the short name, for configs
register("prompts", "palestra.environments.bundled.prompts:Prompts")
register("stockroom", "palestra.environments.bundled.stockroom:Stockroom")
