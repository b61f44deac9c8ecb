"""Pages for people with a browser: what there is, and the API to try out. They need no internet."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

ASSETS = "docs-assets"
SWAGGER_UI = Path(str(files("fastapi_swagger.resources")))

# Tells the browser to load nothing from elsewhere.
ONLY_FROM_HERE = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
}
WELCOME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Palestra</title>
<link rel="icon" href="ui/static/icon.svg">
<link rel="stylesheet" href="ui/static/view.css">
</head>
<body>
<header class="top"><span class="home">palestra</span></header>
<main class="welcome">
<h1>A server that trains and samples language models</h1>
<ul>
<li><a href="ui/">Dashboard</a>: runs, the server at work, episodes, a playground; where keys are needed, with a key
<li><a href="docs">API documentation</a>, to read and to try out; <a href="openapi.json">as OpenAPI JSON</a>
<li><a href="healthz">Health</a>: the server answers; <a href="readyz">readiness</a>: its models are loaded
<li><a href="metrics">Metrics</a> for Prometheus; where keys are needed, with a key
</ul>
<p>The Tinker SDK takes this address as <code>base_url</code>, OpenAI's clients take it with <code>/v1</code> behind it.
<code>palestra --help</code> lists the commands; guides are in the folder <code>docs</code> of the project.</p>
</main>
</body>
</html>
"""


def add_pages(app: FastAPI) -> None:
    """Adds the pages; the app is made without FastAPI's own, which fetch their scripts from a CDN."""
    for path, page in (("/", _welcome), ("/docs", _docs)):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount(f"/{ASSETS}", StaticFiles(directory=SWAGGER_UI), name=ASSETS)


async def _welcome() -> HTMLResponse:
    return HTMLResponse(WELCOME, headers=ONLY_FROM_HERE)


async def _docs() -> HTMLResponse:
    """Addresses are relative, for servers behind a proxy."""
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Palestra: API",
        swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS}/favicon-32x32.png",
    )
    page.headers.update(ONLY_FROM_HERE)
    return page
