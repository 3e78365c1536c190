"""Between an engine's steps and those who read its output: queues, merging, many streams in one, admission by tokens,
counters. Imports types and errors alone, so that tests need no engine. The next way to send output goes here.
"""
