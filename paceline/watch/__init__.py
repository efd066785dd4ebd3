"""What is seen of a run while it goes on, and what stays of it afterwards.

- `run_folder`: where a run keeps its configuration, its events and every replica's output
- `events`: what happened, a JSON object a line; and the one thing nobody reports by itself, a stall
- `display`: the progress, as a live table on a terminal and as plain lines elsewhere
- `output`: how all of that gets to stdout and stderr without anybody waiting for a reader

Only the supervisor writes here and only it draws; nothing here imports torch.
"""
