"""Replicas whose parameters are on servers, as the training loop sees them: an engine (`engine`), the same for all
replicas of one process (`in_graph`), for one that is cut over devices (`cut_replica`, `devices`), and tables for
mirrored replicas (`only_tables`)."""
