"""Converts played episodes to rollouts, with the tokens of exactly the attempts that were graded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from palestra.chat import ChatTokenizer
from palestra.rollouts.episodes.pictures import (
    NO_FILES,
    LostPicture,
    named_pictures,
    placed_pictures,
)
from palestra.rollouts.sources import ERROR_LENGTH, blank_rollout, lost_rollouts, set_turn_times
from palestra.rollouts.turn_messages import shown_tokens, turn_messages
from palestra.types import StopReason
from palestra.types.episodes import EpisodeResult, EpisodeTrajectory, GroupState, PlayedEpisode, PlayedGroup, ResultKey
from palestra.types.pictures import PictureFile
from palestra.types.rollouts import FAILURES, Branch, Group, GroupRequest, Message, Rollout, RolloutStop, Turn
from palestra.types.sampling import VersionSegment

UNGRADED = "ungraded"
"""Type of an error which means that nothing went wrong, but no reward could be given."""
STALE = "stale_weights"
GRADED = {*RolloutStop} - FAILURES | {RolloutStop.TIMEOUT}
"""How a rollout may have ended that has a reward."""


class EpisodeReader:
    """Converts episodes. `step_of` maps the server's versions of weights to this run's steps; `is_trained` says which
    conversations beside the main one are kept, by their agents (None: all)."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        step_of: Callable[[int], int],
        is_trained: Callable[[str], bool] | None = None,
    ) -> None:
        self._tokenizer, self._step_of = tokenizer, step_of
        self._is_trained = is_trained or (lambda _agent: True)

    def group(
        self,
        played: PlayedGroup,
        request: GroupRequest,
        newest: int,
        files: Mapping[str, PictureFile] = NO_FILES,
    ) -> Group:
        """`newest` is the step that the group is played for. `files`: those of its pictures, by their digests at the
        server."""
        group = Group(id=request.id, task=request.task, step=request.step)
        if played.state is GroupState.DROPPED:
            stop = RolloutStop.STALE if played.reason.startswith(STALE) else RolloutStop.LOST
            group.rollouts = lost_rollouts(request, stop, played.reason)
        else:
            group.rollouts = [self._rollout(episode, request, newest, files) for episode in played.episodes]
        return group

    def _rollout(
        self, episode: PlayedEpisode, request: GroupRequest, newest: int, files: Mapping[str, PictureFile]
    ) -> Rollout:
        info, result = episode.info, episode.info.result or EpisodeResult()
        rollout = blank_rollout(request, info.index, info.seed)
        nothing = Branch(id="", prompt=[], turns=[])
        trained = result.metadata.get(ResultKey.TRAINED_AGENTS)
        played = [one for one in episode.trajectories if not isinstance(trained, list) or one.agent in trained]
        try:
            own, *others = [self._branch(one, newest, files) for one in played] or [nothing]
        except LostPicture as error:
            rollout.stop, rollout.error = RolloutStop.MASKED, str(error)
            return rollout
        rollout.prompt, rollout.turns, rollout.agent = own.prompt, own.turns, own.agent
        rollout.pictures = own.pictures
        rollout.temperature = own.temperature
        rollout.branches = [branch for branch in others if self._is_trained(branch.agent)]
        for number, branch in enumerate(rollout.branches, 1):
            branch.id = f"{rollout.id}/{number}"
        rollout.picture_files = {one.file.digest: one.file for row in rollout.rows for one in row.pictures}
        rollout.metrics = dict(result.metrics)
        rollout.verdict = verdict if isinstance(verdict := result.metadata.get(ResultKey.VERDICT), dict) else {}
        rollout.seconds = max(0.0, (info.ended_at or 0.0) - (info.claimed_at or info.ended_at or 0.0))
        set_turn_times(rollout, result.metadata.get(ResultKey.TURN_TIMES))
        rollout.messages = self._messages(rollout, request, result)
        grade_rollout(rollout, result)
        return rollout

    def _branch(self, trajectory: EpisodeTrajectory, newest: int, files: Mapping[str, PictureFile]) -> Branch:
        branch = Branch(id="", prompt=trajectory.tokens, turns=[], agent=trajectory.agent)
        branch.pictures = placed_pictures(trajectory, files)
        for read, start, end in _spans(trajectory.loss_mask):
            tokens, segments = trajectory.tokens[start:end], self._segments(trajectory, start, end, newest)
            if not branch.turns:
                branch.prompt = trajectory.tokens[:start]
            turn = Turn(
                observation=trajectory.tokens[read:start] if branch.turns else [],
                tokens=tokens,
                logprobs=trajectory.logprobs[start:end],
                stop=StopReason.STOP,
                version=segments[0].version,
                segments=segments if len(segments) > 1 else [],
                text=self._tokenizer.decode(tokens),
            )
            branch.turns.append(turn)
            # A temperature other than 1 makes the sampler's logprobs useless for the whole row, whatever those of other
            # turns were.
            branch.temperature = next((t for t in trajectory.temperatures[start:end] if t != 1.0), branch.temperature)
        if branch.turns and trajectory.is_cut:
            branch.turns[-1].stop = StopReason.LENGTH
        return branch

    def _segments(self, trajectory: EpisodeTrajectory, start: int, end: int, newest: int) -> list[VersionSegment]:
        """Returns which steps' weights sampled the tokens from `start` to `end`."""
        found: list[VersionSegment] = []
        is_inexact = trajectory.inexact_mask[start:end] or [0] * (end - start)
        for place, (version, inexact) in enumerate(zip(trajectory.versions[start:end], is_inexact, strict=True)):
            segment = VersionSegment(place, min(self._step_of(version), newest), is_exact=not inexact)
            if not found or (segment.version, segment.is_exact) != (found[-1].version, found[-1].is_exact):
                found.append(segment)
        return found

    def _messages(self, rollout: Rollout, request: GroupRequest, result: EpisodeResult) -> list[Message]:
        """Returns the messages as the player reported them, or else decoded from the tokens."""
        kept_messages = result.metadata.get(ResultKey.MESSAGES)
        if isinstance(kept_messages, list) and all(isinstance(one, dict) and "role" in one for one in kept_messages):
            named = named_pictures(kept_messages, rollout.pictures)
        else:
            named = None
        return self._decoded(rollout, request) if named is None else named

    def _decoded(self, rollout: Rollout, request: GroupRequest) -> list[Message]:
        at = len(rollout.prompt)
        named = named_pictures(request.task.prompt, [one for one in rollout.pictures if one.start < at])
        shown = shown_tokens(self._tokenizer, rollout.prompt, 0, rollout.pictures) if named is None else ""
        first: list[Message] = [{"role": "user", "content": shown}] if named is None else named
        return [*first, *turn_messages(rollout, self._tokenizer)]


def grade_rollout(rollout: Rollout, result: EpisodeResult) -> None:
    """Notes what an episode's result says of the rollout: its reward, or why it has none."""
    if result.error is not None:
        kind = result.error.type
        rollout.error = " ".join(f"{kind}: {result.error.message}".split())[:ERROR_LENGTH]
        rollout.stop = _stop_of(kind, FAILURES, RolloutStop.DONE if kind == UNGRADED else RolloutStop.ENV_FAILED)
        return
    rollout.stop = _stop_of(result.metadata.get(ResultKey.STOP), GRADED, RolloutStop.DONE)
    rollout.agent_rewards = dict(result.agent_rewards)
    rollout.reward = result.total
    if len(result.step_rewards) == len(rollout.turns):
        for turn, reward in zip(rollout.turns, result.step_rewards, strict=True):
            turn.reward = reward


def _stop_of(value: object, allowed: set[RolloutStop], otherwise: RolloutStop) -> RolloutStop:
    return next((stop for stop in allowed if stop == value), otherwise)


def _spans(mask: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields for each turn where its observation begins, where its sampled tokens begin, and where they end."""
    read = 0
    while 1 in mask[read:]:
        start = mask.index(1, read)
        end = mask.index(0, start) if 0 in mask[start:] else len(mask)
        yield read, start, end
        read = end
