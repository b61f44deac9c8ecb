"""The page on which a person plays a task of the platform: tools as forms, the diff and the verdict beside them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from palestra.environments.platform import PlatformError
from palestra.environments.platform.golden import ANSWER_TOOL
from palestra.util.json_types import JsonObject
from palestra.view.api import json_response
from palestra.view.pages import Form
from palestra.view.rendering import render
from palestra.view.tasks.task_plays import NoSuchPlay, PlayLimit, TaskChoice, TaskPlays, list_apps
from palestra.view.tasks.tool_forms import form_fields, read_arguments

api = APIRouter(prefix="/api/v1/platform", tags=["platform"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
LOCAL = "local"


class CallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tool: str
    arguments: JsonObject = {}


class AnswerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    answer: str


def get_player() -> str:
    """The owner of a play. Without a server all visitors are one owner."""
    return LOCAL


def _plays(request: Request) -> TaskPlays:
    return request.app.state.plays


Player = Annotated[str, Depends(get_player)]
PlaysNow = Annotated[TaskPlays, Depends(_plays)]


async def _body(request: Request) -> bytes:
    return await request.body()


Body = Annotated[bytes, Depends(_body)]


@api.get("/apps")
def show_apps(player: Player) -> Response:
    """The apps of the local platform with their task templates."""
    return json_response(list_apps())


@api.get("/plays")
def show_plays(plays: PlaysNow, player: Player) -> Response:
    """The caller's plays by hand that have not ended, the most recently used first."""
    return json_response(plays.list(player))


@api.post("/plays")
def begin_play(plays: PlaysNow, player: Player, body: Body) -> Response:
    """Begins to play a task: `task` is its key, or `app`, `template` and `number` choose it, and what is left out is
    drawn by chance. Each owner has 4 plays at most, and the one that was not used for longest ends."""
    return json_response(plays.begin(player, msgspec.json.decode(body or b"{}", type=TaskChoice)))


@api.get("/plays/{play_id}")
def show_play(plays: PlaysNow, player: Player, play_id: str) -> Response:
    """The task, its tools, the calls with their results, what has changed in the world, and the verdict on it."""
    return json_response(plays.show(player, play_id))


@api.post("/plays/{play_id}/calls")
def call_tool(plays: PlaysNow, player: Player, play_id: str, body: Body) -> Response:
    """Calls a `tool` with `arguments`; returns the play, in which the call is the last."""
    asked = msgspec.json.decode(body, type=CallRequest)
    return json_response(plays.call(player, play_id, asked.tool, asked.arguments))


@api.post("/plays/{play_id}/answer")
def give_answer(plays: PlaysNow, player: Player, play_id: str, body: Body) -> Response:
    """Gives the final `answer`, which the verdict is then about; it may be given again."""
    return json_response(plays.give_answer(player, play_id, msgspec.json.decode(body, type=AnswerRequest).answer))


@api.delete("/plays/{play_id}")
def end_play(plays: PlaysNow, player: Player, play_id: str) -> Response:
    """Ends a play; returns those that are left."""
    plays.close(player, play_id)
    return json_response(plays.list(player))


@pages.get("/platform")
def platform_page(request: Request, plays: PlaysNow, player: Player, app: str = "", task: str = "") -> HTMLResponse:
    return _chooser(request, plays, player, app, task)


@pages.post("/platform")
def begin_on_page(request: Request, plays: PlaysNow, player: Player, form: Form) -> Response:
    number = form.get("number", "").strip()
    choice = TaskChoice(
        form.get("task", ""), form.get("app", ""), form.get("template", ""), int(number) if number.isdecimal() else None
    )
    try:
        play = plays.begin(player, choice)
    except PlatformError as error:
        return _chooser(request, plays, player, choice.app, choice.task, str(error))
    return RedirectResponse(f"./platform/{play.id}", status_code=303)


@pages.get("/platform/{play_id}")
def play_page(request: Request, plays: PlaysNow, player: Player, play_id: str) -> HTMLResponse:
    try:
        play = plays.show(player, play_id)
    except NoSuchPlay as error:
        return _chooser(request, plays, player, "", "", str(error), 404)
    fields = {tool.name: form_fields(tool.parameters) for tool in play.tools}
    return render(request, "platform_play.html", play=play, fields=fields, problem="")


@pages.post("/platform/{play_id}/tools/{tool}")
def call_on_page(
    request: Request, plays: PlaysNow, player: Player, play_id: str, tool: str, form: Form
) -> HTMLResponse:
    try:
        return _called(request, plays, player, play_id, tool, form)
    except NoSuchPlay as error:
        return render(request, "platform_ended.html", problem=str(error))


@pages.post("/platform/{play_id}/end")
def end_on_page(plays: PlaysNow, player: Player, play_id: str) -> Response:
    plays.close(player, play_id)
    return RedirectResponse("../../platform", status_code=303)


def _called(
    request: Request, plays: TaskPlays, player: str, play_id: str, tool: str, form: dict[str, str]
) -> HTMLResponse:
    play, problem = plays.show(player, play_id), ""
    known = {one.name: one.parameters for one in play.tools}
    arguments = read_arguments(known[tool], form) if tool in known else {}
    try:
        if tool == ANSWER_TOOL:
            play = plays.give_answer(player, play_id, str(arguments.get("answer", "")))
        else:
            play = plays.call(player, play_id, tool, arguments)
    except PlayLimit as error:
        problem = str(error)
    return render(request, "platform_state.html", play=play, problem=problem)


def _chooser(
    request: Request, plays: TaskPlays, player: str, app: str, task: str, problem: str = "", status: int = 0
) -> HTMLResponse:
    apps = list_apps()
    chosen = next((one for one in apps if one.key == app), apps[0])
    content = {"apps": apps, "chosen": chosen, "plays": plays.list(player), "task": task, "problem": problem}
    return render(request, "platform.html", status or (400 if problem else 200), **content)
