"""Benchmarks: Paceline and its peers side by side, in one run, by one command (`make bench`).

A figure on its own says little: the machine, its load and its temperature are in it. So every figure here is a ratio
of two that were measured in turn, several times, on the same cores with the same number of threads:

    scripts/        what a user of each peer would write, complete; can be run by hand
    processes       starts a script as a user of the peer would, pinned alike
    training        step times of those scripts        measure     rounds, medians, ratios
    mlp … start     one module a benchmark             load        whether the machine was ours
    report, plot, machine                               what is done with the figures
"""
