"""A program for the Python of `make llama-cpp`: what llama.cpp makes of a GGUF file.

Reads a JSON object from standard input (`model`, `adapter` or null, `texts`, `tokens`) and prints one: the `tokens` of
each text, and the log-probability of each of `tokens` but the first, given those before it.
"""

import json
import sys

import numpy as np
from llama_cpp import Llama

asked = json.load(sys.stdin)
model = Llama(
    asked["model"],
    lora_path=asked["adapter"],
    n_ctx=256,
    n_batch=256,
    type_k=0,
    type_v=0,
    n_threads=1,
    logits_all=True,
    verbose=False,
)
tokens = asked["tokens"]
model.eval(tokens)
scores = np.asarray(model.scores[: len(tokens) - 1], dtype=np.float64)
top = scores.max(-1, keepdims=True)
logprobs = scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))
json.dump(
    {
        "tokens": [model.tokenize(text.encode(), special=True) for text in asked["texts"]],
        "logprobs": logprobs[np.arange(len(tokens) - 1), tokens[1:]].tolist(),
    },
    sys.stdout,
)
