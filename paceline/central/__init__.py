"""Parameters on servers: who owns them, who closes a step, how bytes get there."""
