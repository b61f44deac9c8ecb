"""Where images come from."""


def rewrite_image(image: str | None, rewrites: list[dict[str, str]]) -> str | None:
    """The first rule `{from, to}` whose beginning fits changes it."""
    if image is None:
        return None
    found = (rule["to"] + image[len(rule["from"]) :] for rule in rewrites if image.startswith(rule["from"]))
    return next(found, image)
