"""A picture of coloured shapes, drawn without a library, as a PNG file."""

from __future__ import annotations

import hashlib

from palestra.util.png import png_file

Colour = tuple[int, int, int]

WHITE, BLACK = (255, 255, 255), (0, 0, 0)
COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (20, 150, 40),
    "blue": (40, 60, 220),
    "orange": (245, 150, 20),
}


class Canvas:
    """Rows of red, green and blue bytes. Coordinates are units, of which each is `scale` pixels wide."""

    def __init__(self, side: int, scale: int = 1) -> None:
        self.side, self.scale = side * scale, scale
        self._rows = [bytearray(bytes(WHITE) * self.side) for _ in range(self.side)]

    def rectangle(self, left: int, top: int, right: int, bottom: int, colour: Colour) -> None:
        """The right and the bottom line belong to it no longer."""
        scale = self.scale
        for y in range(top * scale, bottom * scale):
            self._span(y, left * scale, right * scale, colour)

    def square(self, x: int, y: int, radius: int, colour: Colour) -> None:
        self.rectangle(x - radius, y - radius, x + radius, y + radius, colour)

    def circle(self, x: int, y: int, radius: int, colour: Colour) -> None:
        x, y, radius = x * self.scale, y * self.scale, radius * self.scale
        for row in range(-radius, radius):
            half = round((radius**2 - (row + 0.5) ** 2) ** 0.5)
            self._span(y + row, x - half, x + half, colour)

    def triangle(self, x: int, y: int, radius: int, colour: Colour) -> None:
        """With a tip above."""
        x, y, radius = x * self.scale, y * self.scale, radius * self.scale
        for row in range(2 * radius):
            half = (row + 2) // 2
            self._span(y - radius + row, x - half, x + half, colour)

    @property
    def pixels(self) -> bytes:
        return b"".join(self._rows)

    @property
    def digest(self) -> str:
        """Equal for equal pictures."""
        return hashlib.blake2b(self.pixels, digest_size=16).hexdigest()

    def png(self) -> bytes:
        return png_file(self.pixels, self.side, self.side)

    def _span(self, y: int, left: int, right: int, colour: Colour) -> None:
        left, right = max(0, left), min(self.side, right)
        if 0 <= y < self.side and left < right:
            self._rows[y][3 * left : 3 * right] = bytes(colour) * (right - left)
