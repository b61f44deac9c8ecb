"""A loop around LiteLLM: what many agents are made of."""

import json
import os

import litellm
from lookup import TOOL, lookup

MODEL = f"openai/{os.environ['MODEL']}"
messages = [{"role": "user", "content": os.environ["TASK"]}]
while True:
    message = litellm.completion(MODEL, messages=messages, tools=[TOOL]).choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = lookup(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
print(message.content)
