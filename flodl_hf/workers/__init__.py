"""Worker processes: their start, their messages, and the report of their end.

Used by predictions on several devices (`flodl_hf.inference.workers`), file jobs (`flodl_hf.jobs.ranks`) and the server
(`flodl_hf.serving`). A worker is connected with its parent by a socket. The socket closes with either process: a worker
never outlives its parent, and the parent detects any end of a worker immediately.

process   start, main function and end of a child process
messages  wire format, blocking connections, connections of asyncio
pool      workers of a program with threads: requests with futures, and Python objects in messages
"""
