"""A transformer in one process, plain torch: python benchmarks/scripts/blocks_alone.py"""

import torch
from blocks import Transformer, loss, make_data, make_optimizer, parse
from peak import peak
from stopwatch import Stopwatch


def main() -> None:
    options = parse(__doc__)
    with peak(options.memory):
        model = Transformer(options)
        optimizer = make_optimizer(model)
        x, y = make_data(options)
        watch = Stopwatch(options.times)
        for rows in torch.randperm(len(x)).split(options.batch_size):
            optimizer.zero_grad()
            loss(model, (x[rows], y[rows])).backward()
            optimizer.step()
            watch.step()


if __name__ == "__main__":
    main()
