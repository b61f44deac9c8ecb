"""The server: speaks HTTP, orders and keeps requests, owns the engine workers. No torch."""
