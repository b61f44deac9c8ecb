"""A machine full of players that dies when it likes, as a process: `python -m tests.server.episodes.simulated_player`.

Each player is a client of its own. It claims, asks the model once, and ends with a reward that only this attempt's
tokens have. After a claim the whole machine may be killed, with everything it holds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading

import openai

from palestra.episodes import Episode, EpisodeClient, NoEpisode
from tests.server.episodes.simulated_trainer import SAMPLED, reward_of


def play(model: openai.OpenAI, episode: Episode) -> None:
    asks = f"{episode.task.prompt[0]['content']} {episode.id} {episode.attempt}"
    answer = model.with_options(api_key=episode.api_key, base_url=episode.base_url).chat.completions.create(
        model=episode.model,
        messages=[{"role": "user", "content": asks}],
        max_tokens=SAMPLED,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    response = answer.model_dump()
    episode.end(reward_of([*response["prompt_token_ids"], *response["choices"][0]["token_ids"]]))


def play_on(
    url: str, run: str, model: openai.OpenAI, is_over: threading.Event, luck: random.Random, odds: float
) -> None:
    with EpisodeClient(url, "tml-test") as client:
        while not is_over.is_set():
            try:
                with client.episode(run, wait_s=1.0, on_error="release") as episode:
                    if luck.random() < odds:
                        os.kill(os.getpid(), signal.SIGKILL)
                    play(model, episode)
            except (NoEpisode, openai.APIError):
                continue  # nothing to play; or it was given back, or lost: somebody will play it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("--players", type=int, default=8)
    parser.add_argument("--odds", type=float, default=0.0, help="that a claim is this machine's last")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    is_over, luck = threading.Event(), random.Random(args.seed)
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    http = openai.DefaultHttpxClient(verify=False, trust_env=False)
    model = openai.OpenAI(api_key="none", base_url=args.url, max_retries=8, timeout=60, http_client=http)
    players = [
        threading.Thread(target=play_on, args=(args.url, args.run, model, is_over, luck, args.odds))
        for _ in range(args.players)
    ]
    for player in players:
        player.start()
    for player in players:
        player.join()


if __name__ == "__main__":
    main()
