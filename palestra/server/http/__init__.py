"""Authentication, bodies, log lines and API descriptions, which the routes of all protocols share."""
