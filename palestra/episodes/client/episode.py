"""An episode that a thread plays.

Owns: nothing; `async_episode` does the work. Never touches: claiming.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsFloat, Unpack

from palestra.episodes.client.async_episode import MODEL_RETRIES, AsyncEpisode, EpisodeView
from palestra.episodes.client.facade import Facade, waits
from palestra.episodes.client.results import ResultParts, result_of
from palestra.types.episodes import EndAnswer

if TYPE_CHECKING:
    import openai


class Episode(EpisodeView, Facade[AsyncEpisode]):
    """An episode that this client plays: its task, its model, its end."""

    def __init__(self, inner: AsyncEpisode):
        EpisodeView.__init__(self, inner.held_lease)
        Facade.__init__(self, inner)

    def openai(self, **options: Any) -> openai.OpenAI:
        """An OpenAI client whose calls belong to this attempt; options are those of the SDK."""
        from openai import OpenAI

        options.setdefault("max_retries", MODEL_RETRIES)
        return OpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def end(self, reward: SupportsFloat | None = None, **parts: Unpack[ResultParts]) -> EndAnswer:
        """Ends the episode; returns when the server has stored the result. `is_kept` of the answer is false if it came
        too late. Raises InvalidResult for an impossible result."""
        return self.end_with(result_of(reward, **parts))  # read here: a reward may be a tensor

    end_with = waits(AsyncEpisode.end_with)
    release = waits(AsyncEpisode.release)
    check = waits(AsyncEpisode.check)
    leave = waits(AsyncEpisode.leave)
