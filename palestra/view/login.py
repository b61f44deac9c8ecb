"""The page that asks for a key, where one is needed.

Owns: the form and the cookie. Never touches: the rule; `access` has it.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from palestra.view.access import Access
from palestra.view.pages import Form
from palestra.view.rendering import render

WRONG_KEY_S = 1.0  # guessing takes its time
KEEP_S = 30 * 86400
router = APIRouter(include_in_schema=False)


@router.get("/login")
def show_login(request: Request, next: str = "") -> Response:  # noqa: A002
    return render(request, "login.html", next=next, is_wrong=False)


@router.post("/login")
async def log_in(request: Request, form: Form) -> Response:
    access: Access = request.app.state.access
    if not access.knows(form.get("key", "")):
        await asyncio.sleep(WRONG_KEY_S)
        return render(request, "login.html", 403, next=form.get("next", ""), is_wrong=True)
    response = RedirectResponse(f"./{_own_path(form.get('next', ''))}", status_code=303)
    is_secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    response.set_cookie(
        access.cookie_name, access.cookie_value(), max_age=KEEP_S, httponly=True, samesite="lax", secure=is_secure
    )
    return response


def _own_path(path: str) -> str:
    """A path below the dashboard, whatever a link to the login page says."""
    is_own = not path.startswith(("/", "\\")) and ":" not in path.split("?")[0] and ".." not in path
    return path if is_own and path.isprintable() and "\\" not in path else ""
