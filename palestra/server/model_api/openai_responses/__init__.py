"""OpenAI's Responses API: another format of a chat call and its answer. Begin at `calls`."""
