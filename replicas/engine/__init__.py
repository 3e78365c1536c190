"""The engine: the scheduler, the loop that plans, runs and commits, and the thread that it runs on.

May import execution, kv, text and grammar; startup/ and entrypoints/ may import every folder but simulated and
profiling. The next state of a request goes to sequence.py or engine_request.py.
"""
