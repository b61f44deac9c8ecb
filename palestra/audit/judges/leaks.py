"""Answers that the policy can read before it gives one."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.audit.episodes import ProbeEpisode, text_of
from palestra.audit.evidence import Evidence, finding_of
from palestra.audit.findings import AuditFinding, FindingKind, Severity
from palestra.audit.known_answers import is_labelled, share_of_own, stands_in
from palestra.audit.policies import ProbeKind

UNKNOWING = (ProbeKind.NOTHING, ProbeKind.RANDOM, ProbeKind.REPEATED, ProbeKind.MALFORMED)
"""Policies that do not know the answer."""
LABELLED_SHARE = 0.3  # of the tasks with known answers: a label beside a short answer may be chance
STANDING_SHARE, CHANCE_SHARE = 0.9, 0.2
FEWEST = 4  # tasks from which shares say something
SHORTEST = 3  # characters of an answer whose mere presence says something


def judge_leaks(evidence: Evidence) -> list[AuditFinding]:
    if not evidence.answers:
        return []
    return [*_labelled(evidence)] or [*_standing(evidence)]


def _labelled(evidence: Evidence) -> Iterator[AuditFinding]:
    """An answer beside a word such as `expected`, in what the environment said of itself."""
    leaks: dict[str, tuple[ProbeEpisode, str]] = {}
    for one in evidence.all(*UNKNOWING):
        read = readable(one)
        for answer in evidence.answers.get(one.task, ()):
            if is_labelled(answer, read) and not _was_said(one, answer):
                leaks.setdefault(one.task, (one, answer))
    if leaks and len(leaks) >= LABELLED_SHARE * len(evidence.answers):
        _, answer = next(iter(leaks.values()))
        seen = f"The answer {answer[:60]!r} is named before the episode ends."
        yield finding_of(FindingKind.ANSWER_LEAK, Severity.ERROR, [one for one, _ in leaks.values()], seen)


def _standing(evidence: Evidence) -> Iterator[AuditFinding]:
    """Each task's own answer in what it shows, and hardly ever that of another: it was put there."""
    shown: dict[str, ProbeEpisode] = {}
    texts: dict[str, str] = {}
    for one in evidence.all(*UNKNOWING):
        answers = [answer for answer in evidence.answers.get(one.task, ()) if len(answer) >= SHORTEST]
        if not answers or any(_was_said(one, answer) for answer in answers):
            continue
        shown.setdefault(one.task, one)
        texts[one.task] = texts.get(one.task, "") + "\n" + readable(one)
    if len(texts) < FEWEST:
        return
    answers = {task: [one for one in evidence.answers[task] if len(one) >= SHORTEST] for task in texts}
    own, others = share_of_own(answers, texts)
    if own >= STANDING_SHARE and others <= CHANCE_SHARE:
        first = next(iter(shown.values()))
        seen = f"The answer {answers[first.task][0][:60]!r} stands in what the policy reads before it answers."
        yield finding_of(FindingKind.ANSWER_LEAK, Severity.WARNING, list(shown.values()), seen)


def readable(episode: ProbeEpisode) -> str:
    """Returns what the policy has read before its last message."""
    messages = list(episode.messages)
    if episode.is_done:
        last = max((place for place, one in enumerate(messages) if one["role"] == "assistant"), default=len(messages))
        messages = messages[:last]
    return "\n".join(text_of(one) for one in messages if one["role"] != "assistant")


def _was_said(episode: ProbeEpisode, answer: str) -> bool:
    """Whether the policy itself said it: an observation may repeat what was said."""
    return any(stands_in(answer, text_of(one)) for one in episode.messages if one["role"] == "assistant")
