"""One server's share of a container: `container` is parameters, gradients and optimizer, `steps` carries out what the
chief decides, `buffers` are the model's, `bounds` refuses what makes no sense."""
