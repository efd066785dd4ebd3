"""What replicas, clients and servers say to each other (`requests`, `replies`), over what (`connection`), and how their
tensors look meanwhile (`tensor_bytes`, `coding`); `records` and `notes` are what a server must not forget, `settings`
how a container is trained."""
