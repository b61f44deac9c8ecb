"""The model endpoint: chats that go on token for token, each call kept.

Begin at `service`. `chat/` and `completions/` speak as OpenAI's clients and vLLM's expect, `responses/` is OpenAI's
Responses API, `messages/` Anthropic's Messages API.
"""
