"""Translators between a protocol's wire format and `Ask` and `StreamMessage`: one module or group of modules for each
protocol.
"""
