"""Profiler behind `motley profile`: shows where a step's time goes, module by module, and which modules are too
slow.
"""
