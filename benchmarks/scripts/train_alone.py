"""One process, plain torch: python benchmarks/scripts/train_alone.py"""

import torch
from stopwatch import Stopwatch
from workload import loss, make_data, make_model, make_optimizer, parse


def main() -> None:
    options = parse(__doc__).parse_args()
    model = make_model(options)
    optimizer = make_optimizer(options, model)
    x, y = make_data(options, replicas=1)
    watch = Stopwatch(options.times)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x)).split(options.batch_size):
            optimizer.zero_grad()
            loss(model, (x[rows], y[rows])).backward()
            optimizer.step()
            watch.step()


if __name__ == "__main__":
    main()
