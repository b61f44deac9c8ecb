"""Plays episodes of a running server with the `openai` SDK, in a plain loop.

    palestra serve                                   # somewhere
    python examples/play_episodes.py --register 8    # makes some sums to play; leave it out where a trainer does
    python examples/play_episodes.py --server http://gpu-box:8000 --key tml-…

Needs `pip install palestra openai`: no model, no GPU. Start as many as you like, and kill them when you like.
"""

import argparse
import random
import re

from palestra.episodes import Episode, EpisodeClient, NewGroup, NoEpisode, Task

TRIES = 3


def play(episode: Episode) -> float:
    """A conversation under the episode's own key: its tokens are kept, exactly, for the trainer."""
    model, messages, tries = episode.openai(), list(episode.task.prompt), 0
    while episode.can_continue and tries < TRIES:
        answer = model.chat.completions.create(model=episode.model, messages=messages, max_tokens=64)
        text, tries = answer.choices[0].message.content or "", tries + 1
        if re.findall(r"-?\d+", text)[-1:] == [str(episode.task.extras["answer"])]:
            return 1.0 / tries
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No. Try again."}]
    return 0.0


def register(client: EpisodeClient, run: str, count: int) -> None:
    """What a trainer does: groups of four episodes of one task each."""
    for _ in range(count):
        a, b, name = random.randrange(50), random.randrange(50), f"{random.getrandbits(64):x}"
        prompt = [{"role": "user", "content": f"What is {a} + {b}?"}]
        task = Task(id=f"add-{a}-{b}", environment="arithmetic", prompt=prompt, extras={"answer": a + b})
        client.run(run).register([NewGroup(group_id=name, task=task, size=4)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--key", help="where the server needs one  [TINKER_API_KEY]")
    parser.add_argument("--run", default="sums")
    parser.add_argument("--register", type=int, default=0, metavar="N", help="groups of sums to begin with")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="stop when nothing came for so long  [never]")
    args = parser.parse_args()
    with EpisodeClient(args.server, args.key) as client:
        register(client, args.run, args.register)
        while True:
            try:
                with client.episode(args.run, wait_s=args.wait) as episode:
                    reward = play(episode)
                    ended = episode.end(reward, is_success=reward > 0)
                    print(f"{episode.id} {episode.task.id}: {reward:.2f} ({ended.status})", flush=True)
            except NoEpisode:
                break
