"""What the routes of all protocols share: authentication, bodies, log lines, API descriptions."""
