"""Plays games of TextArena with moves drawn at random, and prints them as conversations, for `imitation.data`.

A model that cannot read a game's rules learns from them how moves are written, and no more: that some are better than
others it learns from rewards. Needs `pip install 'palestra[textarena]'`.

    python examples/random_games.py GuessTheNumber-v0 --args '{"max_number": 7, "max_turns": 3}' \\
        --moves 1 2 3 4 5 6 7 --count 24 > examples/data/guesses.jsonl
"""

import argparse
import json
import random

from palestra.environments.text import BaseTextEnv
from palestra.environments.textarena import environment

FIRST_SEED = 2_000_000  # games that are neither trained on nor evaluated


def play(game: BaseTextEnv, moves: list[str], rng: random.Random) -> list[dict]:
    """Returns the conversation of one game."""
    messages, _ = game.init([])
    while True:
        messages.append({"role": "assistant", "content": f"[{rng.choice(moves)}]"})
        step = game.step(messages[-1]["content"])
        if step["done"]:
            return messages
        messages += step["observations"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game")
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="arguments of the game")
    parser.add_argument("--moves", nargs="+", required=True, help="one is drawn for each turn, and put into brackets")
    parser.add_argument("--count", type=int, default=24, metavar="N", help="how many games  [24]")
    options = parser.parse_args()
    for seed in range(FIRST_SEED, FIRST_SEED + options.count):
        game = environment(options.game)({"args": options.args}, {"seed": seed})
        # Not the game's own numbers: these have drawn what is to be guessed.
        print(json.dumps({"messages": play(game, options.moves, random.Random(f"moves of {seed}"))}))
