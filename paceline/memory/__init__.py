"""Memory: parameters, gradients and optimizer state as flat buffers that lie once per host.

`layout` decides where every tensor lies and how the bytes are cut into chunks and shards (pure arithmetic); `segment`
makes shared memory, `arena` sees it as tensors, `model_arena` and `server_arena` are its regions for one model; `heap`
keeps what a process has once touched. Nothing here knows of strategies.
"""
