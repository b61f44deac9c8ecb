"""What a server of NeMo Gym's uses without requiring it, because NeMo Gym brings it along.

Owns: which of those packages its code imports and we do not have. Never touches: installing them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from palestra.gym.code_imports import imports_of

BROUGHT = {
    "PIL": "pillow",
    "anthropic": "anthropic",
    "datasets": "datasets",
    "devtools": "devtools",
    "git": "GitPython",
    "httpx": "httpx",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "mlflow": "mlflow-skinny",
    "multipart": "python-multipart",
    "numpy": "numpy",
    "openai": "openai",
    "pandas": "pandas",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "pydot": "pydot",
    "ray": "ray",
    "requests": "requests",
    "rich": "rich",
    "scipy": "scipy",
    "tenacity": "tenacity",
    "tqdm": "tqdm",
    "wandb": "wandb",
}
"""By the name they are imported under, what to install. NeMo Gym's own requirements and some of theirs."""


def brought_along(entrypoint: Path) -> list[str]:
    """Requirements beyond those that the folder names."""
    found = {one.package for one in imports_of(entrypoint)}
    missing = [name for name in BROUGHT if name in found and importlib.util.find_spec(name) is None]
    return [BROUGHT[name] for name in missing]
