"""The model endpoint: chats that continue token for token, with every call stored. Begin at `service`. `openai_chat/`
and `openai_completions/` have OpenAI's and vLLM's formats, `openai_responses/` OpenAI's Responses API,
`anthropic_messages/` Anthropic's Messages API.
"""
