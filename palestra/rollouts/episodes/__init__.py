"""Rollouts that are episodes at a server, played by anybody who claims them."""
