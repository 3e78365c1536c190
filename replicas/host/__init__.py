"""The machine and this process: cores, memory, private folders, threads, logs, garbage collection, the frames and
queues of child processes, and which fields of dataclasses are metrics. Imports nothing of Motley but errors and knows
nothing of models; every folder may import it. The next thing asked of the operating system goes here.
"""
