"""Plays an environment with verifiers' own evaluation (v0), and prints its rewards by example."""

import json
import sys

import verifiers as vf
from verifiers.types import ClientConfig

name, args, url, count, rollouts = sys.argv[1:]
sys.path.insert(0, ".")
env = vf.load_environment(name, **json.loads(args))
client = ClientConfig(api_base_url=url, api_key_var="ANY_KEY")
done = env.evaluate_sync(client, "scripted", {}, int(count), int(rollouts))
print("REWARDS", json.dumps([[one["example_id"], one["reward"], bool(one["error"])] for one in done["outputs"]]))
