"""Several processes that answer HTTP at one port, and their parent, which holds the workers' processes.

parent   listens, hands connections over, tells which workers there are, adds up what is counted
answers  one process that answers

A client's connection is handed to the process that has fewest, so that all have as many; it asks every worker by a
link of its own, and rows of all of them share batches in the worker.
"""
