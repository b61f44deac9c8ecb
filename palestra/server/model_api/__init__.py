"""The model endpoint: chats that continue token for token, with every call stored. Begin at `service`. `chat/` and
`completions/` implement OpenAI's and vLLM's formats, `responses/` OpenAI's Responses API, `messages/` Anthropic's
Messages API."""
