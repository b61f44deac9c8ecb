"""The reference of every config key, from the classes that read the configs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import griffe
import msgspec
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from palestra.config.environment_entries import GymEntry
from palestra.config.serve import ServeConfig
from palestra.config.sweep import SweepConfig
from palestra.config.train import DistillConfig, DpoConfig, GrpoConfig, RunConfig, SftConfig
from palestra.gym.agents.gymnasium import GymnasiumAgent
from palestra.gym.agents.remote import RemoteAgent
from palestra.gym.agents.simple import SimpleAgent
from palestra.gym.config.settings import OurSettings
from palestra.gym.models.settings import CaptureSettings, OpenAISettings, TokenCapture, VLLMSettings
from palestra.gym.servers.resources import ResourcesSettings
from palestra.gym.servers.settings import settings_type
from scripts.reference.pages import Reference, code, page, table

HEAD = ["key", "type", "default", "meaning"]


def pages(reference: Reference) -> None:
    serve, train, sweep, gym = (_Configs(reference, file) for file in ("serve", "train", "sweep", "gym"))
    reference.pages["reference/config-serve.md"] = page(
        "Config of a server",
        "Made from the code. `palestra serve -c FILE KEY=VALUE` takes these keys, dotted where they are nested: "
        "`limits.max_models=10`, `models.0.device=cpu`. [Serving](../serving.md) has those worth knowing.",
        serve.sections(ServeConfig, ""),
    )
    shared = set(RunConfig.model_fields)
    reference.pages["reference/config-train.md"] = page(
        "Config of a training run",
        "Made from the code. `palestra train FILE KEY=VALUE` takes these keys, dotted where they are nested: "
        "`rollout.group_size=4`. [Training](../training.md) shows how they go together.",
        [
            "## Every kind of run",
            *train.sections(RunConfig, ""),
            *(
                part
                for kind in (GrpoConfig, DistillConfig, SftConfig, DpoConfig)
                for part in (f"## kind: {kind.__name__.removesuffix('Config').lower()}", *_own(reference, kind, shared))
            ),
            "## A sweep",
            "Written in the file of a sweep, for `palestra sweep FILE`. [Sweeps](../sweeps.md) shows one.",
            *sweep.sections(SweepConfig, ""),
            "## An environment called gym",
            "The `config` of an entry of `environments` whose name is `gym` or `gym:NAME`.",
            *train.sections(GymEntry, "environments[].config."),
        ],
    )
    reference.pages["reference/config-gym.md"] = page(
        "Config of a gym",
        "Made from the code. Files of a gym name servers, and each server has settings; [A gym](../gym.md) shows such "
        "files. Keys beside the servers that are not here are NeMo Gym's own.",
        [
            "## Settings of the whole gym",
            "Written below `gym:`, or as `gym.KEY=VALUE` on the command line.",
            *gym.sections(OurSettings, "gym."),
            "Written beside the servers:",
            *gym.struct(CaptureSettings, ""),
            *gym.struct(TokenCapture, "token_id_capture."),
            *(
                part
                for title, kind in _servers()
                for part in (f"## {title}", *_Configs(reference, f"gym {title}").struct(kind, ""))
            ),
        ],
    )


def _own(reference: Reference, kind: type[BaseModel], shared: set[str]) -> list[str]:
    name = kind.__name__.removesuffix("Config").lower()
    return _Configs(reference, f"train {name}").sections(kind, "", skip=shared)


def _servers() -> list[tuple[str, type[msgspec.Struct]]]:
    agents = {"simple_agent": SimpleAgent, "gymnasium_agent": GymnasiumAgent, "remote_agent": RemoteAgent}
    return [
        ("Every resources server", ResourcesSettings),
        *((f"The agent {name}", settings_type(agent, agent.plain_settings)) for name, agent in agents.items()),
        ("The model server vllm_model", VLLMSettings),
        ("The model server openai_model", OpenAISettings),
    ]


class _Configs:
    """The keys of one kind of file."""

    def __init__(self, reference: Reference, file: str) -> None:
        self._reference, self._file = reference, file

    def sections(self, model: type[BaseModel], prefix: str, skip: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
        """A table of the class's own keys, then one for each class below it."""
        own, below = [], []
        notes = _notes(model)
        for name, field in model.model_fields.items():
            if name in skip:
                continue
            inner = next(_models_in(field.annotation), None)
            is_list = "list" in str(field.annotation)
            about = field.description or notes.get(name) or (inner.__doc__ if inner is not None else None)
            meaning = self._reference.explained(about, f"the config key `{prefix}{name}`", f"`{_where(model)}`")
            kind = "list" if inner and is_list else "keys below" if inner else type_text(field.annotation)
            default = "" if inner and not is_list else _default(field)
            meaning = self._public(f"{prefix}{name}", kind, default, meaning)
            own.append([code(name), code(kind), code(default), meaning])
            if inner is not None:
                path = f"{prefix}{name}{'[]' if is_list else ''}"
                below += [f"### {path}", *self.sections(inner, f"{path}.")]
        return [table(HEAD, own), *below]

    def struct(self, kind: type[msgspec.Struct], prefix: str) -> list[str]:
        """The same for the settings of a gym's servers."""
        notes = {name: text for one in reversed(kind.__mro__) for name, text in _notes(one).items()}
        rows = []
        for field in msgspec.structs.fields(kind):
            what = f"the setting `{prefix}{field.encode_name}` of {kind.__name__}"
            meaning = self._reference.explained(notes.get(field.name), what, f"`{_where(kind)}`")
            default = "required" if field.required else _shown(_struct_default(field))
            meaning = self._public(f"{prefix}{field.encode_name}", type_text(field.type), default, meaning)
            rows.append([code(field.encode_name), code(type_text(field.type)), code(default), meaning])
        return [table(HEAD, rows)]

    def _public(self, key: str, kind: str, default: str, text: str) -> str:
        return self._reference.public("key", f"{self._file}: {key}", f"{kind} = {default}", text)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _notes(kind: type) -> dict[str, str]:
    """The texts below the fields of a class, which only its source has."""
    if not kind.__module__.startswith("palestra."):
        return {}
    source = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
    module = griffe.visit(kind.__module__, filepath=Path(inspect.getfile(kind)), code=source)
    found = module.members.get(kind.__name__)
    members = found.members.items() if found is not None else ()
    return {name: one.docstring.value for name, one in members if one.is_attribute and one.docstring}


def _where(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _struct_default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "" if field.default is PydanticUndefined else _shown(field.default)


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Path):
        return str(value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_plain(value) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def type_text(annotation: Any) -> str:
    """The type in the words of YAML."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(one.value) for one in annotation)
    arguments = get_args(annotation)
    origin = str(annotation)
    if origin.startswith("typing.Literal"):
        return " or ".join(map(str, arguments))
    if origin.startswith("typing.Annotated"):
        return type_text(arguments[0])
    if arguments and ("Union" in type(annotation).__name__ or "Union" in origin):
        return " or ".join("null" if one is type(None) else type_text(one) for one in arguments)
    name = getattr(annotation, "__name__", origin)
    if arguments:
        return f"{name} of {' to '.join(type_text(one) for one in arguments if one is not Ellipsis)}"
    names = {
        "str": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
        "Path": "path",
        "dict": "keys",
    }
    return names.get(name, name.lower())
