"""The old name of `palestra.environments.grading.grader_processes`, for one version."""

from __future__ import annotations

from palestra.util.renamed import renamed

__getattr__ = renamed(
    __name__,
    ChildError="palestra.environments.grading.grader_processes:ChildError",
    GraderProcesses="palestra.environments.grading.grader_processes:GraderProcesses",
    NoChildError="palestra.environments.grading.grader_processes:NoChildError",
)
