"""Several HTTP processes on one port, and their parent, which starts them and the worker processes.

parent        listens, distributes connections and workers, sums metrics
http_process  one HTTP process

The parent gives each connection to the process with the fewest. Each process has its own connection to every worker;
rows of all processes share batches in the worker.
"""
