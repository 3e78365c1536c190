"""Every other process of a divided model: its main loop, its versions of the weights, and the files of new weights it
receives. May import parallel.transport, calls and planning, updates, capacity, loading, execution, gpu, model and
checkpoint, never leader. What a follower does when it is called goes here.
"""
