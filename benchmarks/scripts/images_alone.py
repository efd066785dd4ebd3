"""One process, plain torch: python benchmarks/scripts/images_alone.py"""

import torch
from images import Memory, loss, make_data, make_model, parse
from stopwatch import Stopwatch


def main() -> None:
    options = parse(__doc__)
    model = make_model(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = make_data(options)
    watch, memory = Stopwatch(options.times), Memory(options.memory)
    model.train(not options.forward)
    with torch.set_grad_enabled(not options.forward):
        for rows in torch.arange(len(x)).split(options.batch_size):
            found = loss(model, (x[rows], y[rows]))
            if not options.forward:
                optimizer.zero_grad()
                found.backward()
                optimizer.step()
            watch.step()
    memory.write()


if __name__ == "__main__":
    main()
