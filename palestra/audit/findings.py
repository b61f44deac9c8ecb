"""Findings of an audit: what was seen, why it matters and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Training on it goes wrong."""
    WARNING = "warning"
    """It costs time or data, or may be meant."""


class FindingKind(StrEnum):
    """What is wrong; docs/audit.md says when each is found."""

    GOLD_FAILS = "gold-fails"
    IDLE_PAYS = "idle-pays"
    RANDOM_PAYS = "random-pays"
    CHEAT_PAYS = "cheat-pays"
    EXECUTES_ANSWER = "executes-answer"
    STRAY_CHANGE_PAYS = "stray-change-pays"
    ANSWER_LEAK = "answer-leak"
    REWARD_RANGE = "reward-range"
    UNGRADED = "ungraded"
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    MEMORY = "memory"
    NONDETERMINISTIC = "nondeterministic"
    INTERFERENCE = "interference"
    NO_VARIANCE = "no-variance"
    UNSTABLE_TASKS = "unstable-tasks"
    DUPLICATE_TASKS = "duplicate-tasks"
    HELD_OUT_TRAINED = "held-out-trained"


class FindingText(NamedTuple):
    why: str
    advice: str


TEXTS: dict[FindingKind, FindingText] = {
    FindingKind.GOLD_FAILS: FindingText(
        "A policy that solves the task is not rewarded, so that training moves away from solving it.",
        "Play the solution by hand (palestra env play, palestra agent verify) and mend it or the verifier.",
    ),
    FindingKind.IDLE_PAYS: FindingText(
        "A policy that does nothing is rewarded, and doing nothing is the first thing that training finds.",
        "Give no reward unless something was done: check a required change or answer, and start from 0.",
    ),
    FindingKind.RANDOM_PAYS: FindingText(
        "Chance solves the task, so that rewards say little about the policy.",
        "Ask for something that cannot be guessed, or let wrong calls and changes cost the reward.",
    ),
    FindingKind.CHEAT_PAYS: FindingText(
        "What was said or done does not solve the task; training finds it sooner than a solution.",
        "Grade the final answer alone, exactly, and where the policy cannot write; refuse what is not asked for.",
    ),
    FindingKind.EXECUTES_ANSWER: FindingText(
        "What the model says is executed with all rights of the process that trains: it may change rewards and files.",
        "Read an answer as data (`ast.literal_eval`, a grammar of numbers), or execute it in a sandbox.",
    ),
    FindingKind.STRAY_CHANGE_PAYS: FindingText(
        "Damage beside the solution costs nothing, so that the policy learns to do whatever comes to hand.",
        "Compare the whole state with what may have changed, not only the rows that should have.",
    ),
    FindingKind.ANSWER_LEAK: FindingText(
        "The policy reads the answer before it gives one, and learns to copy it.",
        "Keep the answer out of prompts, observations and error messages; where copying is the task, ignore this kind.",
    ),
    FindingKind.REWARD_RANGE: FindingText(
        "Rewards outside the range distort advantages and success rates; NaN loses the rollout.",
        "Clip or rescale the sum over all steps, or say the range: `reward_range = (low, high)` in the class.",
    ),
    FindingKind.UNGRADED: FindingText(
        "Episodes without a reward count nowhere: their tokens are sampled for nothing.",
        "Let the verifier answer 0 for wrong work, and None only where it failed itself.",
    ),
    FindingKind.CRASH: FindingText(
        "The rollout is lost, where a wrong answer would be graded; a model can say anything.",
        "Catch it where the action is read or the episode begins, and answer with a text or a reward of 0.",
    ),
    FindingKind.HANG: FindingText(
        "A call that does not return holds up its group until the time limit.",
        "Bound the work of a step (input lengths, patterns, loops, requests) and answer with an error.",
    ),
    FindingKind.SLOW: FindingText(
        "Steps that take long leave the sampler waiting.",
        "Do heavy work once per task, or in `__init__`; make waiting methods async.",
    ),
    FindingKind.MEMORY: FindingText(
        "Memory that grows with every episode ends a long run.",
        "Keep state in the object and release it in `close`; look for lists and caches in classes and modules.",
    ),
    FindingKind.NONDETERMINISTIC: FindingText(
        "The same actions on the same task go differently: rewards are noise, and a resumed run is another one.",
        "Draw from a generator that is seeded by the task, and keep times and random ids out of observations.",
    ),
    FindingKind.INTERFERENCE: FindingText(
        "Episodes that run at the same time change each other, as all rollouts of a group do.",
        "Keep the state of an episode in its object, not in classes, modules, files or a server's one session; "
        "let a server take as many sessions as there are rollouts, or try fewer (--at-once N).",
    ),
    FindingKind.NO_VARIANCE: FindingText(
        "Groups whose rollouts all get the same reward have no advantage: nothing is learned from them.",
        "Make solved and unsolved episodes differ in reward, or leave out tasks that are solved by everything.",
    ),
    FindingKind.UNSTABLE_TASKS: FindingText(
        "The tasks differ from one listing to the next: no evaluation can be repeated and no run resumed.",
        "Make tasks from a fixed seed, and never in the order of a set or by `hash` of a text.",
    ),
    FindingKind.DUPLICATE_TASKS: FindingText(
        "A task that is there several times counts several times.",
        "Leave repeated rows out, or set the environment's weight instead.",
    ),
    FindingKind.HELD_OUT_TRAINED: FindingText(
        "Held-out tasks that are trained on measure memory, not skill.",
        "Split by content before rows are drawn; `palestra data` finds and removes such rows in files.",
    ),
}


class AuditFinding(Struct, frozen=True, kw_only=True):
    """Something that is wrong with an environment, as it was seen."""

    kind: FindingKind
    severity: Severity
    probe: str
    """What was played."""
    task: str
    """The first task on which it was seen; empty if it is about all of them."""
    seen: str
    """What was seen, in a sentence."""
    tasks: int = 1
    """Number of tasks on which it was seen."""
    transcript: list[str] = []
    """The beginning of the episode, a line for each message."""
    why: str = ""
    """Why it matters."""
    advice: str = ""
    """What to do about it."""


def finding(
    kind: FindingKind,
    severity: Severity,
    probe: str,
    task: str,
    seen: str,
    *,
    tasks: int = 1,
    transcript: list[str] | None = None,
) -> AuditFinding:
    """Makes a finding with the texts of its kind."""
    why, advice = TEXTS[kind]
    return AuditFinding(
        kind=kind,
        severity=severity,
        probe=probe,
        task=task,
        seen=seen,
        tasks=tasks,
        transcript=transcript or [],
        why=why,
        advice=advice,
    )
