"""The page that asks for a key, where one is needed."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from palestra.view.access import LoginRefused, PageAccess
from palestra.view.pages import Form
from palestra.view.rendering import render

WRONG_KEY_S = 1.0  # guessing takes its time
KEEP_S = 30 * 86400
router = APIRouter(include_in_schema=False)


@router.get("/login")
def show_login(request: Request, next: str = "") -> Response:  # noqa: A002
    return _form(request, next)


@router.post("/login")
async def log_in(request: Request, form: Form) -> Response:
    access: PageAccess = request.app.state.access
    try:
        value = await access.log_in(form.get("key", "").strip())
    except LoginRefused as refused:
        await asyncio.sleep(WRONG_KEY_S)
        return _form(request, form.get("next", ""), str(refused))
    response = RedirectResponse(f"./{_own_path(form.get('next', ''))}", status_code=303)
    _set_cookie(request, response, value, KEEP_S)
    return response


@router.post("/logout")
async def log_out(request: Request) -> Response:
    response = RedirectResponse("./login", status_code=303)
    _set_cookie(request, response, "", 0)
    return response


def _form(request: Request, target: str, complaint: str = "") -> Response:
    hint = request.app.state.access.login_hint
    return render(request, "login.html", 403 if complaint else 200, next=target, hint=hint, complaint=complaint)


def _set_cookie(request: Request, response: Response, value: str, keep_s: int) -> None:
    """Sets the cookie without a path, which makes it the path of this page: the browser knows what a proxy has put
    before it."""
    is_secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    name = request.app.state.access.cookie_name
    response.set_cookie(name, value, max_age=keep_s, path=None, httponly=True, samesite="strict", secure=is_secure)


def _own_path(path: str) -> str:
    """A path below the dashboard, whatever a link to the login page says."""
    is_own = not path.startswith(("/", "\\")) and ":" not in path.split("?")[0] and ".." not in path
    return path if is_own and path.isprintable() and "\\" not in path else ""
