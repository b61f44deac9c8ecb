"""A small agent: one conversation with a model, one tool that runs a command in the shell.

It runs in a sandbox with nothing but Python's standard library. Variables: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL and
PROMPT. It ends with status 0 when the model calls no tool any more, when the steps are used up, or when the context is
full; with 1 when the model cannot be reached.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

SYSTEM = "You work at a Unix shell. Do the task with the tool `bash`, then answer with one sentence."
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command and returns what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
RETRIES = 8
KEPT = 8000  # characters of a command's output: its beginning and its end
FULL = "context_length_exceeded"


class ContextFull(Exception):
    pass


def ask(messages, options):
    """Returns the model's message. A server that is restarted is asked again."""
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": [TOOL]}
    if options.max_tokens:
        body["max_tokens"] = options.max_tokens
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    for attempt in range(RETRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if FULL in text:
                raise ContextFull from None
            can_retry = error.code in (429, 500, 502, 503, 504) and error.headers.get("x-should-retry") != "false"
            if not can_retry or attempt == RETRIES:
                sys.exit(f"the model endpoint answered {error.code}: {text[:500]}")
        except OSError as error:
            if attempt == RETRIES:
                sys.exit(f"the model endpoint cannot be reached: {error}")
        time.sleep(min(0.5 * 2**attempt, 10.0))
    raise AssertionError


def run(call, seconds):
    """Returns what a tool call came to, in words."""
    function = call["function"]
    if function["name"] != "bash":
        return f"there is no tool {function['name']!r}, only bash"
    try:
        command = json.loads(function["arguments"])["command"]
    except (ValueError, KeyError, TypeError):
        return "the arguments should be JSON with a `command`"
    print(f"$ {command}", flush=True)
    try:
        done = subprocess.run(
            ["bash", "-c", str(command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return shortened(error.stdout or b"") + f"\n[took longer than {seconds:g} s and was ended]"
    except (OSError, ValueError) as error:
        return f"it cannot be run: {error}"
    return shortened(done.stdout) + (f"\n[status {done.returncode}]" if done.returncode else "")


def shortened(output):
    text = output.decode(errors="replace").rstrip("\n")
    if len(text) > KEPT:
        text = f"{text[: KEPT // 2]}\n[{len(text) - KEPT} characters left out]\n{text[-KEPT // 2 :]}"
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50, help="most model calls")
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds of a command")
    parser.add_argument(
        "--max-tokens", type=int, default=0, help="most tokens of an answer; 0: as many as there is room for"
    )
    parser.add_argument("--system", default=SYSTEM, help="the system prompt")
    options = parser.parse_args()
    messages = [{"role": "system", "content": options.system}, {"role": "user", "content": os.environ["PROMPT"]}]
    for _ in range(options.steps):
        try:
            answer = ask(messages, options)
        except ContextFull:
            print("[the context is full]", flush=True)
            return
        if answer.get("content"):
            print(answer["content"], flush=True)
        if not answer.get("tool_calls"):
            return
        messages.append(answer)
        for call in answer["tool_calls"]:
            result = run(call, options.seconds)
            print(result, flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print("[the steps are used up]", flush=True)


if __name__ == "__main__":
    main()
