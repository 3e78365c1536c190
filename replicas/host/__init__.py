"""The machine and this process: cores, memory, private folders, threads, logs, garbage collection, and the frames and
queues of child processes. Imports nothing of Motley but errors and knows nothing of models; every folder may import it.
The next thing asked of the operating system goes here.
"""
