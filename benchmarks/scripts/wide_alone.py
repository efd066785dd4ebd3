"""One process, plain torch: python benchmarks/scripts/wide_alone.py"""

from stopwatch import Stopwatch
from wide import go, make_model, make_optimizer, parse


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--fused", action="store_true", help="fused=True in the optimizer")
    options = parser.parse_args()
    model = make_model(options)
    go(options, model, make_optimizer(model, fused=options.fused or None), Stopwatch(options.times).step)


if __name__ == "__main__":
    main()
