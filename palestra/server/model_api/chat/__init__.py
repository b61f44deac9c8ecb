"""Chat completions: from messages to a prompt, from tokens to an answer. Begin at `calls`."""
