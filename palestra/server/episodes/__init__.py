"""The broker of episodes, inside the server, and its HTTP API."""
