"""Rollouts that are episodes at a server, played by any client that claims them."""
