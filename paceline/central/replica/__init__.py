"""Replicas whose parameters are on servers, as the training loop sees them: an engine (`engine`), the same for all
replicas of one process (`in_graph`), which may have the parameters too (`own_server`), for one that is cut over devices
(`cut_replica`, `devices`), and tables for mirrored replicas (`only_tables`)."""
