"""The model endpoint as OpenAI's clients and vLLM's know it: chats that go on token for token, each call kept."""
