"""Pictures through the official SDKs of OpenAI and Anthropic: chats, responses, messages, results of tools."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from palestra.episodes import EpisodeApiError, EpisodeClient, NewGroup, Task
from tests.pictures import data_url, drawn, file_of, pixels_of

if TYPE_CHECKING:
    import anthropic
    import openai

    from tests.server.conftest import Server

ROWS, MODEL = 12, "Qwen/Qwen3-8B"
COLD = {"temperature": 0}
SIZE = {"max_tokens": 6, "temperature": 0.0}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class PictureHost(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/a.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(file_of(drawn()))

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """The address of a host that has a picture."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), PictureHost) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def seeing(make_module_server, random_model, host: str) -> Server:
    return make_module_server(model=random_model("qwen3_5_vl"), picture_hosts=[host])


@pytest.fixture(scope="module")
def client(seeing: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="tml-test", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(seeing: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=seeing.url, api_key="tml-test", max_retries=0) as client:
        yield client


def image(seed: int = 0) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(file_of(drawn(seed)))}}


def words(text: str) -> Any:
    return {"type": "text", "text": text}


def block(seed: int = 0) -> Any:
    data = base64.b64encode(file_of(drawn(seed))).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def said(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **SIZE, **options)


def tokens_of(seeing: Server, messages: list[Any]) -> list[int]:
    return seeing.http().post("/tokenize", json={"model": MODEL, "messages": messages}).json()["tokens"]


def test_a_picture_stands_where_its_part_does(client: openai.OpenAI, seeing: Server) -> None:
    messages = asked(words("Look "), image(), words(" and count."))
    tokens = tokens_of(seeing, messages)
    start = tokens.index(504)
    assert tokens[start - 1 : start + ROWS + 1] == [503, *[504] * ROWS, 505]
    first, other = said(client, messages), said(client, asked(words("Look "), image(1), words(" and count.")))
    assert first.usage.prompt_tokens == len(tokens)
    assert first.choices[0].message.content != other.choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in said(client, messages, stream=True))
    assert streamed == first.choices[0].message.content
    plain = tokens_of(seeing, asked(words("<|vision_start|><|image_pad|><|vision_end|>")))
    assert 504 not in plain


@pytest.mark.slow
def test_a_conversation_goes_on_behind_a_picture(client: openai.OpenAI, seeing: Server) -> None:
    messages = asked(image(2), words("What is it?"))
    first = said(client, messages)
    more = [
        *messages,
        {"role": "assistant", "content": first.choices[0].message.content},
        *asked(words("And "), image(3)),
    ]
    second = said(client, more)
    trace = seeing.http().get("/v1/traces").json()["data"][0]
    turns = seeing.http().get(f"/v1/traces/{trace['id']}").json()["turns"]
    (shown,) = [part for part in turns[0]["messages"][0]["content"] if part["type"] == "image_url"]
    assert shown["image_url"]["url"].startswith("picture:")
    again = said(client, [*asked(shown, words("What is it?")), *more[1:]])
    assert again.choices[0].message.content == second.choices[0].message.content
    found, *_ = seeing.http().get(f"/v1/traces/{trace['id']}/trajectories").json()["data"]
    assert [one["tokens"] for one in found["images"]] == [ROWS, ROWS]
    assert found["images"][0]["url"] == shown["image_url"]["url"]
    for one in found["images"]:
        places = slice(one["start"], one["start"] + ROWS)
        assert (found["tokens"][places], found["loss_mask"][places]) == ([504] * ROWS, [0] * ROWS)
    pictures = [one["url"].removeprefix("picture:") for one in found["images"]]
    files = [seeing.http().get(f"/v1/pictures/{digest}").content for digest in pictures]
    assert [pixels_of(file) for file in files] == [drawn(seed).tobytes() for seed in (2, 3)]
    assert seeing.http().get(f"/v1/pictures/{'0' * 64}").status_code == 404


def test_an_episode_is_delivered_with_the_pictures_of_its_calls(seeing: Server) -> None:
    """Pictures of one size have the same tokens; a call that shows another one continues nothing."""
    import anthropic
    import openai

    with EpisodeClient(seeing.url, "tml-test") as trainer:
        run = trainer.run("seer")
        run.publish(0, MODEL)
        run.register([NewGroup(group_id="g", size=1, task=Task(id="t", environment="x", prompt=[]))])
        (episode,) = trainer.claim(1, run="seer")
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as player:
            first = asked(words("Look "), image(6))
            answer = player.chat.completions.create(model="policy", messages=first, **SIZE).choices[0].message
            said_before: Any = {"role": "assistant", "content": answer.content}
            more = [*first, said_before, *asked(image(7))]
            player.chat.completions.create(model="policy", messages=more, **SIZE)
            other = [*asked(words("Look "), image(8)), said_before, *asked(image(7))]
            player.chat.completions.create(model="policy", messages=other, **SIZE)
        with anthropic.Anthropic(base_url=seeing.url, api_key=episode.api_key, max_retries=0) as player:
            player.messages.create(model="policy", max_tokens=6, extra_body=COLD, messages=asked(block(9)))
        episode.end(1.0)
        (group,) = run.groups(wait_s=10)
        rows = group.episodes[0].trajectories
        shown = [[pixels_of(run.picture(one.digest)) for one in row.images] for row in rows]
        assert shown == [[drawn(seed).tobytes() for seed in seeds] for seeds in ((6, 7), (8, 7), (9,))]
        for row in rows:
            assert all(row.tokens[one.start : one.start + ROWS] == [504] * ROWS for one in row.images)
        with pytest.raises(EpisodeApiError, match="is not kept here any more"):
            run.picture("0" * 64)


@pytest.mark.slow
def test_all_apis_show_the_model_the_same(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    messages = asked(words("See: "), image(4))
    answer = said(client, messages).choices[0].message.content
    parts: Any = [
        {"type": "input_text", "text": "See: "},
        {"type": "input_image", "image_url": image(4)["image_url"]["url"]},
    ]
    given: Any = [{"role": "user", "content": parts}]
    response: Any = client.responses.create(model=MODEL, input=given, max_output_tokens=6, temperature=0)
    assert response.output_text == answer
    message: Any = claude.messages.create(
        model=MODEL, max_tokens=6, extra_body=COLD, messages=asked(words("See: "), block(4))
    )
    assert message.content[0].text == answer
    counted = claude.messages.count_tokens(model=MODEL, messages=asked(words("See: "), block(4)))
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert counted.input_tokens == response.usage.input_tokens
    more: Any = client.responses.create(
        model=MODEL, input="More?", previous_response_id=response.id, max_output_tokens=6, temperature=0
    )
    assert more.usage.input_tokens > counted.input_tokens + ROWS // 2


@pytest.mark.slow
def test_results_of_tools_have_pictures(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    called: Any = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result: Any = {"role": "tool", "tool_call_id": "c1", "content": [words("Here: "), image(5)]}
    chat = said(client, [*asked(words("Look.")), called, result], tools=[TOOL], tool_choice="none")
    use: Any = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    results: Any = {"type": "tool_result", "tool_use_id": "c1", "content": [words("Here: "), block(5)]}
    message: Any = claude.messages.create(
        model=MODEL,
        max_tokens=6,
        extra_body=COLD,
        messages=[*asked(words("Look.")), {"role": "assistant", "content": [use]}, *asked(results)],
        tools=[{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
        tool_choice={"type": "none"},
    )
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    output: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [
                {"type": "input_text", "text": "Here: "},
                {"type": "input_image", "image_url": image(5)["image_url"]["url"]},
            ],
        },
    ]
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    response: Any = client.responses.create(
        model=MODEL, input=output, tools=tools, tool_choice="none", max_output_tokens=6, temperature=0
    )
    assert response.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/a.png", "is not fetched"),
        ("http://127.0.0.1/a.png", "is not fetched"),
        ("file:///etc/passwd", "is not fetched"),
        ("data:image/png;base64,???", "not base64"),
        (data_url(b"no picture"), "no PNG, JPEG, WEBP, GIF file"),
        (data_url(file_of(drawn(), "GIF", save_all=True, append_images=[drawn(1)])), "animated"),
        ("picture:" + "0" * 64, "is not kept here any more"),
    ],
)
def test_what_cannot_be_seen_is_refused_with_its_place(client: openai.OpenAI, url: str, why: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=why) as refused:
        said(client, asked(words("Look"), {"type": "image_url", "image_url": {"url": url}}))
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.slow
def test_what_anthropics_blocks_lack_is_said_with_their_place(claude: anthropic.Anthropic) -> None:
    import anthropic

    odd: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    messages = asked(words("Look"), odd)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]: a picture \(1 bytes"):
        claude.messages.create(model=MODEL, max_tokens=6, system="Be brief.", messages=messages)


@pytest.mark.slow
def test_hosts_that_the_config_names_are_asked(client: openai.OpenAI, host: str) -> None:
    import openai

    here = said(client, asked(image())).choices[0].message.content
    there: Any = {"type": "image_url", "image_url": {"url": f"http://{host}/a.png"}}
    assert said(client, asked(there)).choices[0].message.content == here
    elsewhere: Any = {"type": "image_url", "image_url": {"url": f"http://{host}/elsewhere"}}
    with pytest.raises(openai.BadRequestError, match="answered 302"):
        said(client, asked(elsewhere))
