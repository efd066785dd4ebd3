"""What replicas, clients and servers say to each other (`protocol`), over what (`connection`), and how tensors look
meanwhile (`tensor_bytes`, `coding`); `records` are what a server must not forget."""
