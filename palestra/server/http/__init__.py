"""What the routes of all protocols share: who is calling, bodies in and out, log lines, API descriptions."""
