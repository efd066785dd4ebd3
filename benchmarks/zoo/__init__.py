"""The zoo: published architectures, small and with random weights, under every strategy (`make zoo`).

Each cell of the table is two trainings in processes of their own, one alone and one distributed, compared number by
number. It says what a user would find: equal; refused, and with which sentence; or a mistake of ours.

    models                              which architectures there are
    language, sound, vision, plain      how each is made, with its loss and made-up data
    train                               the script that is started: `paceline run benchmarks/zoo/train.py -- gpt2`
    strategies                          what is typed for each, and what the result has to be equal to
    cell, compare                       one cell: started, waited for, and judged
    table                               all cells: kept in a file, and written to `docs/zoo.md`
"""
