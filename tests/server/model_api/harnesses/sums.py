"""A task for `inspect eval`, without the hub."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums() -> Task:
    pairs = [(3, 4), (5, 2), (6, 3), (8, 1)]
    samples = [Sample(input=f"What is {a} + {b}?", target=str(a + b)) for a, b in pairs]
    return Task(dataset=samples, solver=generate(), scorer=includes())
