"""Load on a running service, and what its clients see: workloads, senders for each protocol, samples and their report.

A new protocol is a sender here and a line of `sender_factory.create_sender`.
"""
