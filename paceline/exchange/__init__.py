"""Exchange: how processes agree, and how bytes travel.

`board` holds the shared words of a host and `together` what replicas do by them; `shared` adds up small things through
shared memory, `links` large ones between hosts, coded by a `wire`. Nothing here knows of strategies.
"""
