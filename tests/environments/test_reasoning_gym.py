"""With the real reasoning-gym, where it is installed: its questions, and the scores that it gives itself."""

from __future__ import annotations

import asyncio

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import EnvironmentFailure, EnvironmentSet, UnknownEnvironment

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: make clients")

GENERATORS = {
    "chain_sum": {},
    "gcd": {},
    "leg_counting": {},
    "letter_counting": {},
    "countdown": {},
    "number_sorting": {},
    "simple_equations": {},
    "spell_backward": {},
    "word_ladder": {},
    "decimal_chain_sum": {},
}
SUMS = {"reasoning_gym": "chain_sum", "args": {"size": 300, "max_terms": 2, "max_digits": 2}}


def opened(entry):
    return EnvironmentSet([EnvironmentEntry.model_validate(entry)], env_threads=2, env_timeout_s=20)


def tasks_of(entry, split):
    with opened(entry) as envs:
        return [task for _, tasks in envs.tasks(split) for task in tasks]


async def scored(envs, tasks, answers):
    found = []
    for task, answer in zip(tasks, answers, strict=True):
        session = envs.open(task)
        await session.init(task.prompt)
        step = await session.step(answer)
        found.append((step.reward, step.done))
        await session.close()
    return found


def rewards(entry, tasks, answers):
    with opened(entry) as envs:
        return asyncio.run(scored(envs, tasks, answers))


@pytest.mark.parametrize("name", GENERATORS)
def test_rewards_are_the_generators_own(name):
    entry = {"reasoning_gym": name, "args": {"size": 40, "seed": 7}}
    theirs = reasoning_gym.create_dataset(name, size=40, seed=7)
    tasks = [*tasks_of(entry, "train"), *tasks_of(entry, "eval")]
    entries = [theirs[task.extras["index"]] for task in tasks]
    assert [task.prompt[-1]["content"] for task in tasks] == [one["question"] for one in entries]
    right = [one["answer"] for one in entries]
    for answers in (right, ["7"] * len(tasks), [f"{one} 1" for one in right]):
        expected = [(theirs.score_answer(said, one), True) for said, one in zip(answers, entries, strict=True)]
        assert rewards(entry, tasks, answers) == expected
        assert rewards(entry, tasks, [f"I think <answer>{said}</answer>" for said in answers]) == expected


EVALUATING = ["binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"]
EVALUATING += ["puzzle24", "simple_integration", "spiral_matrix", "string_insertion"]


def test_what_an_answer_says_in_python_does_nothing(tmp_path):
    """These generators evaluate answers. One event loop: they share the processes that score."""
    files = [tmp_path / name for name in ("python", "shell")]
    cheats = [
        f"open({str(files[0])!r}, 'w')",
        f"__import__('os').system('touch {files[1]}')",
        "__import__('os')._exit(0)",
    ]

    async def played(name):
        entry = {"reasoning_gym": name, "args": {"size": 8}}
        task, theirs = tasks_of(entry, "train")[0], reasoning_gym.create_dataset(name, size=8, seed=0)
        with opened(entry) as envs:
            answers = [*cheats, theirs[task.extras["index"]]["answer"]]
            return [reward for reward, _ in await scored(envs, [task] * len(answers), answers)]

    async def all_of():
        return [await played(name) for name in EVALUATING]

    for name, (*cheating, right) in zip(EVALUATING, asyncio.run(all_of()), strict=True):
        assert max(cheating) < 0.1, name
        assert right == 1.0, name
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize(
    ("name", "answer"), [("boxnet", "1"), ("prime_factorization", "7 = 7"), ("game_of_life", "{}")]
)
def test_an_answer_that_the_generator_cannot_read_is_wrong(name, answer):
    entry = {"reasoning_gym": name, "args": {"size": 4}}
    tasks, theirs = tasks_of(entry, "train")[:1], reasoning_gym.create_dataset(name, size=4, seed=0)
    with pytest.raises((ValueError, TypeError, KeyError)):
        theirs.score_answer(answer, theirs[tasks[0].extras["index"]])
    assert rewards(entry, tasks, [answer]) == [(0.0, True)]


def test_exact_scores_leave_out_what_has_the_answer_in_it():
    entry = {"reasoning_gym": "gcd", "args": {"size": 40, "min_value": 10, "max_value": 99}}
    tasks, theirs = tasks_of(entry, "train"), reasoning_gym.create_dataset("gcd", **entry["args"], seed=0)
    answers = [theirs[task.extras["index"]]["answer"] for task in tasks]
    hedged = [f"{answer}{answer}" for answer in answers]
    exact = {**entry, "config": {"exact": True}}
    assert rewards(entry, tasks, hedged) == [(0.5, True)] * len(tasks)
    assert rewards(exact, tasks, hedged) == [(0.0, True)] * len(tasks)
    assert rewards(exact, tasks, answers) == [(1.0, True)] * len(tasks)


def test_no_question_is_trained_on_and_held_out():
    train, held_out = ({task.prompt[-1]["content"] for task in tasks_of(SUMS, split)} for split in ("train", "eval"))
    assert train
    assert held_out
    assert not train & held_out
    other_seed = {**SUMS, "args": {**SUMS["args"], "seed": 5}}
    assert not train & {task.prompt[-1]["content"] for task in tasks_of(other_seed, "eval")}


def test_a_composite_mixes_by_weight_and_names_its_parts():
    datasets = [{"name": "chain_sum", "weight": 9}, {"name": "gcd"}]
    entry = {"reasoning_gym": "composite", "args": {"size": 200, "datasets": datasets}}
    levels = [task.level for task in tasks_of(entry, "train")]
    assert set(levels) == {"chain_sum", "gcd"}
    assert levels.count("chain_sum") > 4 * levels.count("gcd")


def test_a_curriculum_has_levels():
    entry = {**SUMS, "args": {"size": 60}, "config": {"curriculum": [0, {"num_terms": 3}], "system_prompt": "direct"}}
    tasks = tasks_of(entry, "train")
    assert {task.level for task in tasks} == {"0", "1"}
    assert "<answer>" in tasks[0].prompt[0]["content"]
    longest = max(tasks, key=lambda task: task.prompt[-1]["content"].count(" + "))
    assert longest.level == "1"
    with pytest.raises(ValueError, match="no curriculum"):
        tasks_of({"reasoning_gym": "composite", "args": {"datasets": []}, "config": {"curriculum": 1}}, "train")


def test_what_does_not_exist_is_named():
    with pytest.raises(UnknownEnvironment, match="did you mean chain_sum"):
        opened({"reasoning_gym": "chain_sun"})
    with pytest.raises(ValueError, match="no setting 'level'"):
        tasks_of({**SUMS, "config": {"level": 1}}, "train")


def test_a_second_turn_is_refused():
    (task, *_) = tasks_of(SUMS, "train")

    async def twice(envs):
        session = envs.open(task)
        await session.init(task.prompt)
        await session.step("1")
        with pytest.raises(EnvironmentFailure, match="over"):
            await session.step("1")

    with opened(SUMS) as envs:
        asyncio.run(twice(envs))
