"""Exchange: how processes agree, and how bytes travel.

`board` holds the shared words of a host and `together` what replicas do by them; `shared` adds up small things through
shared memory, `links` large ones between hosts, coded by a `wire`. Nothing here knows of strategies.

`process_group` is for programs of torch.distributed: a `company` of ranks that nobody supervises, their collectives
through a `space`, what they send to one another as `letters`.
"""
