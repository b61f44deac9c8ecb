from __future__ import annotations


class ConfigError(ValueError):
    """What is wrong with a config, one line each: the key, where it was written, what to write instead."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
