"""The server process: `server` listens and knows the containers, `session` answers one connection, `process` is its
main."""
