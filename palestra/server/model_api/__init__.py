"""The model endpoint: chats that continue token for token, with every call stored. Begin at `service`. `chat/` and
`completions/` speak as OpenAI's clients and vLLM's expect, `responses/` is OpenAI's Responses API, `messages/`
Anthropic's Messages API.
"""
