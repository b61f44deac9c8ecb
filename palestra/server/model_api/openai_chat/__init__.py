"""Chat completions: messages become a prompt, tokens an answer. Begin at `calls`."""
