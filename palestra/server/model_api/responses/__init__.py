"""OpenAI's Responses API: another way to write down a chat call and what comes of it. Begin at `calls`."""
