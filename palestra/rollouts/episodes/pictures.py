"""Pictures of delivered episodes: their files from the server, their places among tokens, their names in records.

The server keeps a picture as its model read it, so the file that it gives is a PNG of these pixels: the trainer that
sends it back trains on exactly what was sampled from, whatever file the player had sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from palestra.chat.picture_files import picture_file
from palestra.episodes import AsyncRun, EpisodeApiError
from palestra.rollouts.turn_messages import picture_part
from palestra.types.episodes import EpisodeTrajectory, PlayedGroup
from palestra.types.pictures import PictureFile, PromptPicture
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping
from palestra.util.picture_parts import has_pictures, is_picture

NO_FILES: Mapping[str, PictureFile] = {}
GONE = 404


class LostPicture(Exception):
    """The server does not keep a picture any more."""


async def read_files(run: AsyncRun, played: PlayedGroup) -> dict[str, PictureFile]:
    """The files of a group's pictures that the server still has, by their digests there."""
    found: dict[str, PictureFile] = {}
    for digest in {one.digest for episode in played.episodes for row in episode.trajectories for one in row.images}:
        try:
            found[digest] = picture_file(await run.picture(digest))
        except EpisodeApiError as error:
            if error.status != GONE:
                raise
    return found


def placed_pictures(trajectory: EpisodeTrajectory, files: Mapping[str, PictureFile]) -> list[PromptPicture]:
    """Raises LostPicture."""
    found = []
    for image in trajectory.images:
        if image.digest not in files:
            raise LostPicture(
                f"the server does not keep picture {image.digest[:12]} any more, so its tokens cannot be trained; "
                "raise limits.max_kept_picture_bytes there"
            )
        found.append(PromptPicture(image.start, _rows(trajectory.tokens, image.start), files[image.digest]))
    return found


def _rows(tokens: Sequence[int], start: int) -> int:
    """Positions of a picture: other tokens stand before and behind it."""
    return next((place for place in range(start, len(tokens)) if tokens[place] != tokens[start]), len(tokens)) - start


def named_pictures(messages: Sequence[Message], pictures: Sequence[PromptPicture]) -> list[Message] | None:
    """The messages with the names of files in place of the URLs that their pictures have. None: they do not have
    exactly these pictures."""
    contents = [one["content"] for one in messages if has_pictures([one])]
    if sum(is_picture(part) for content in contents for part in content) != len(pictures):
        return None
    left = iter(pictures)
    return [{**one, "content": list(_named(one["content"], left))} if has_pictures([one]) else one for one in messages]


def _named(parts: Sequence[JsonMapping], left: Iterator[PromptPicture]) -> Iterator[JsonMapping]:
    for part in parts:
        yield picture_part(next(left)) if is_picture(part) else part
