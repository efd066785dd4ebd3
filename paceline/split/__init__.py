"""How one model is cut over several devices: by named dimension, by layer, by image region, by layer and time.

values               what a user asks for: Layout, Stages, Tiles, Wavefront; no torch
cut                  what an engine needs of any cut, and `open_cut`, which opens the one that was asked for
parts                a device's parts of parameters and buffers, in the arena
graph_cut            what cuts that are made of the graph of a computation have in common (`paceline/graph`)
tasks, task_cut      one device's tasks of such a graph, and the cuts that are made of those: stages, cells in waves
collectives          what devices do together in a forward, with the matching thing in backward
layout, stages, tiles, wavefront   a room for each way of cutting
"""
