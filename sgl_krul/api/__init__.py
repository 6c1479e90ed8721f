"""The HTTP API of sessions: schemas, routes, and a client."""
