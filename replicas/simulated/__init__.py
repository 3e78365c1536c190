"""A device that computes nothing and takes the time that a named GPU would, in real and in virtual time.

May import engine and all below it; simulated fleets go to cluster.simulation. Another device that computes nothing goes
here.
"""
